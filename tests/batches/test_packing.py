"""Packing and its inverse: every token once, in place, with the token after it, on any mesh; log-probs cut over TP."""

import itertools
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import parallel_state

import mcore_bridge as mb
from mcore_bridge.batches import logprobs
from mcore_bridge.batches.rows import lay_out_packed, lay_out_rows, whole_rows
from mcore_bridge.errors import BatchError
from mcore_bridge.launch.fake_rank import rank_of
from tests.support import pool
from tests.support.bounds import ONE


@st.composite
def batches(draw):
    """A mask of any kind (left, right, holes, empty rows), a different token at each place, a mesh, and options."""
    rows, seq = draw(st.integers(1, 5)), draw(st.integers(1, 13))
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=rows * seq, max_size=rows * seq))).view(rows, seq)
    tp, cp = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3]))
    dims = mb.ParallelDims(tp=tp, cp=cp, sp=tp > 1 and draw(st.booleans()))
    options = {
        "packed": draw(st.booleans()),
        "multiple_of": draw(st.sampled_from([1, 4])),
        "min_tokens": draw(st.integers(0, 40)),
    }
    return torch.arange(1, 1 + rows * seq).view(rows, seq), mask, dims, options


def dealt(cp, tokens):
    """The places of each rank's tokens in a sequence, computed in another way."""
    chunks = torch.arange(tokens).chunk(2 * cp) if cp > 1 else [torch.arange(tokens)]
    return [torch.cat((chunks[r], chunks[2 * cp - 1 - r])) if cp > 1 else chunks[0] for r in range(cp)]


@given(batches())
def test_every_token_is_in_one_place_with_its_successor(batch):
    input_ids, mask, dims, options = batch
    ranks = [mb.pack_sequences(input_ids, mask, dims=dims, cp_rank=rank, **options) for rank in range(dims.cp)]
    first = ranks[0]
    tokens = first.num_tokens // dims.cp
    assert tokens % ((dims.tp if dims.sp else 1) * options["multiple_of"]) == 0
    assert first.num_tokens >= options["min_tokens"]
    # put the ranks' tokens together again, sequence by sequence
    params = first.packed_seq_params
    assert (params is not None) == options["packed"]
    sizes = params.cu_seqlens_q.diff().tolist() if params else [first.num_tokens]
    rows = [[] for _ in range(first.input_ids.size(0))]
    for row, found in enumerate(rows):
        start = 0
        for size in sizes:
            assert size % (2 * dims.cp if dims.cp > 1 else 1) == 0
            whole = torch.full((3, size), -1)
            for rank, places in zip(ranks, dealt(dims.cp, size), strict=True):
                part = slice(start, start + size // dims.cp)
                own = (rank.input_ids, rank.position_ids, torch.where(rank.loss_mask, rank.labels, 0))
                whole[:, places] = torch.stack([each[row, part] for each in own])
            start += size // dims.cp
            length = whole[0].count_nonzero()
            assert whole[1].tolist() == torch.arange(size).clamp(max=max(int(length) - 1, 0)).tolist()
            found.append((whole[0].tolist(), whole[2].tolist()))
    expected = [row[keep].tolist() for row, keep in zip(input_ids, mask, strict=True)]
    found = [(ids[: len(ids) - ids.count(0)], ids, labels) for row in rows for ids, labels in row]
    assert [real for real, _, _ in found if real] == [row for row in expected if row]
    for real, ids, labels in found:
        assert ids == real + [0] * (len(ids) - len(real))  # padding is at the end
        assert labels == real[1:] + [0] * (len(ids) - max(len(real) - 1, 0))
    if params:
        longest = max(max((len(row) for row in expected), default=0), 512)  # padding is never longer
        assert max(sizes) - longest < (2 * dims.cp if dims.cp > 1 else 1)
        assert params.max_seqlen_q == max(sizes)
        assert all(sizes)


@given(batches())
def test_unpacking_is_the_inverse(batch):
    input_ids, mask, dims, options = batch
    ranks = [mb.pack_sequences(input_ids, mask, dims=dims, cp_rank=rank, **options) for rank in range(dims.cp)]
    own = torch.stack([rank.input_ids for rank in ranks])
    assert torch.equal(mb.unpack_sequences(ranks[-1], own), input_ids * mask)
    labels = torch.stack([rank.labels for rank in ranks])
    behind = mask.long().cumsum(1) > 1  # all tokens except the first of each row
    assert torch.equal(mb.unpack_sequences(ranks[-1], labels, following=True), input_ids * (mask & behind))


def test_what_does_not_fit_is_refused():
    with pytest.raises(BatchError, match=r"must both be \[batch, seq\]"):
        mb.pack_sequences(torch.ones(2, 3, dtype=torch.long), torch.ones(2, 4))
    with pytest.raises(BatchError, match="cp_rank must be 0 to 1 at cp=2, found 2"):
        mb.pack_sequences(torch.ones(2, 3, dtype=torch.long), dims=mb.ParallelDims(cp=2), cp_rank=2)
    packed = mb.pack_sequences(torch.ones(2, 3, dtype=torch.long))
    with pytest.raises(BatchError, match=r"\(1, 1, 6\), found \(1, 6\)"):
        mb.unpack_sequences(packed, torch.zeros(1, 6))
    with pytest.raises(BatchError, match=r"values must be a tensor, found \[0.0\]"):
        mb.unpack_sequences(packed, [0.0])
    with pytest.raises(BatchError, match=r"packed must be a result of pack_sequences, found \{\}"):
        mb.unpack_sequences({}, torch.zeros(1, 6))
    with pytest.raises(BatchError, match="following must be True or False, found 2"):
        mb.unpack_sequences(packed, torch.zeros(1, 6), following=2)
    wrong = {"cp_rank": -1, "packed": 1, "multiple_of": 0, "min_tokens": 2.0, "attention_mask": [1]}
    with pytest.raises(BatchError) as caught:
        mb.pack_sequences(torch.ones(2, 3), **wrong)
    assert all(f"{name} must be" in str(caught.value) for name in ("input_ids", *wrong))
    with pytest.raises(BatchError, match="dims must be a ParallelDims, or None, found 2"):
        mb.pack_sequences(torch.ones(2, 3, dtype=torch.long), dims=2)
    with pytest.raises(BatchError, match=r"with at least one token, found \(2, 0\)"):
        mb.pack_sequences(torch.ones(2, 0, dtype=torch.long))


def test_padded_rows_that_do_not_fit_context_parallelism_or_their_parameters_are_refused():
    """The rows and parameters are made as trainers make them."""
    ids, starts = torch.ones(2, 8, dtype=torch.long), torch.tensor([0, 8, 16])
    params = SimpleNamespace(cu_seqlens_q=starts, cu_seqlens_q_padded=None)
    assert lay_out_packed(ids, ids == 1, params, 2, 1).input_ids.shape == (1, 8)
    for change, message in (
        ({"cp_partition_mode": "contiguous"}, "must be 'zigzag' at cp=2, found 'contiguous'"),
        ({"cu_seqlens_q": starts[:2]}, r"each of 2 rows with \[8, 8\] tokens, a multiple of 4, found \[8\]"),
        ({"cu_seqlens_q_padded": starts // 2}, r"a multiple of 4, found \[4, 4\]"),
        ({"cu_seqlens_q_padded": starts + torch.tensor([0, 2, 4])}, r"a multiple of 4, found \[10, 10\]"),
    ):
        with pytest.raises(BatchError, match=message):
            lay_out_packed(ids, ids == 1, SimpleNamespace(**{**vars(params), **change}), 2, 0)
    with pytest.raises(BatchError, match="must have a multiple of 4 tokens at cp=2, found 6: pad them"):
        lay_out_rows(ids[:, :6], 2, 0)


def test_only_a_mask_of_rows_shows_which_tokens_count():
    """Without a mask, or with another kind of mask, such as one of attention, all tokens count."""
    ids = torch.arange(8).view(2, 4)
    of_rows, of_attention = (ids % 4 < 3).long(), torch.ones(2, 1, 4, 4, dtype=torch.bool)
    with rank_of(ONE, 0, 1):
        group = parallel_state.get_context_parallel_group()
        for mask, expected in ((of_rows, of_rows == 1), (None, ids >= 0), (of_attention, ids >= 0)):
            rows = whole_rows({"input_ids": ids, "attention_mask": mask}, group)
            assert torch.equal(rows.mask, expected)
            assert torch.equal(rows.input_ids, ids)


# log-probabilities over a cut vocabulary ------------------------------------------------------------------------------

VOCAB = 11


def reference(logits, labels, temperature):
    logs = torch.log_softmax(logits[..., :VOCAB] / temperature, -1)
    return logs.gather(-1, labels[..., None])[..., 0], -(logs.exp() * logs).sum(-1)


def on_this_rank(logits, labels, weights, temperature, chunk):
    """This rank's log-probs, entropies and gradient of its logits."""
    logprobs.CHUNK = chunk
    rank, size = dist.get_rank(), dist.get_world_size()
    own = logits.chunk(size, -1)[rank].clone().requires_grad_()
    options = {"vocab_size": VOCAB, "group": dist.group.WORLD, "temperature": temperature}
    found = mb.log_probs(own, labels, **options)
    (found[0] * weights[0] + found[1] * weights[1]).sum().backward()
    return found[0].detach(), found[1].detach(), own.grad


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropies_of_a_cut_vocabulary(world_size, temperature):
    """Vocabularies are padded to 16 columns, of which the last of four ranks has one real one, and to 24, of which it
    has none.
    """
    for columns in (16, 24):
        generator = torch.Generator().manual_seed(columns)
        logits = torch.randn(3, 5, columns, generator=generator) * 4
        labels = torch.randint(0, VOCAB, (3, 5), generator=generator)
        weights = torch.randn(2, 3, 5, generator=generator)
        whole = logits.clone().requires_grad_()
        expected = reference(whole, labels, temperature)
        (expected[0] * weights[0] + expected[1] * weights[1]).sum().backward()
        for chunk in (1 << 26, 7):
            found = pool.run(world_size, on_this_rank, logits, labels, weights, temperature, chunk)
            for log_prob, entropy, _ in found:
                torch.testing.assert_close(log_prob, expected[0].detach())
                torch.testing.assert_close(entropy, expected[1].detach())
            torch.testing.assert_close(torch.cat([grad for _, _, grad in found], -1), whole.grad)


def peaks(num_tokens, vocab, chunk):
    """Bytes that log-probs and their gradient take in addition to the results, in fp32 chunks of bf16 logits."""
    logprobs.CHUNK, kept = chunk, logprobs.CHUNK
    logits = torch.randn(num_tokens, vocab).bfloat16().requires_grad_()
    labels = torch.randint(0, vocab, (num_tokens,))
    options = {"vocab_size": vocab, "group": dist.group.WORLD}
    found, forward = peak_of(lambda: mb.log_probs(logits, labels, **options))
    loss = found[0].sum() + found[1].sum()
    _, backward = peak_of(loss.backward)
    logprobs.CHUNK = kept
    return [taken / (4 * chunk) for taken in (forward, backward - logits.nbytes)]


def peak_of(function):
    """The result of a function, and the most bytes that it held at once."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        found = function()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return found, max(
        itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda each: each.start_ns()))
    )


def test_log_probs_take_few_chunks():
    """No buffer is as large as the logits. The documentation promises at most four buffers of 64 MB."""
    ((forward, backward),) = pool.run(1, peaks, 4096, 1024, 1 << 18)
    assert 1 < forward < 3.8
    assert 1 < backward < 3.8


def test_shapes_that_do_not_fit_are_refused():
    ((larger, none),) = pool.run(1, refused)
    assert larger == "vocab_size must be 1 to 8, as 1 ranks have 8 logits each, found 11"
    assert none.endswith("found 0")


def refused():
    messages, labels = [], torch.zeros(2, dtype=torch.long)
    for vocab_size in (11, 0):
        with pytest.raises(BatchError) as caught:
            mb.log_probs(torch.zeros(2, 8), labels, vocab_size=vocab_size, group=dist.group.WORLD)
        messages.append(str(caught.value))
    return messages


def with_and_without_temperature():
    logits, labels = torch.randn(3, 8), torch.tensor([1, 5, 7])
    own = {"vocab_size": 8, "group": dist.group.WORLD}
    values = mb.log_probs(logits, labels, **own)[0], mb.log_probs(logits, labels, **own, temperature=1.0)[0]
    return [torch.equal(value, values[0]) for value in values]


def test_the_temperature_is_one_by_default():
    assert pool.run(1, with_and_without_temperature) == [[True, True]]


def ignoring(logits, labels, keep):
    """The effect of labels of -100 on this rank: both results, and the gradient of its logits."""
    own = logits.chunk(dist.get_world_size(), -1)[dist.get_rank()].clone().requires_grad_()
    found = mb.log_probs(own, labels.masked_fill(~keep, -100), vocab_size=VOCAB, group=dist.group.WORLD)
    (found[0].sum() + found[1].sum()).backward()
    return found[0].detach(), found[1].detach(), own.grad


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_label_that_torch_ignores_has_no_log_prob_and_no_gradient(world_size):
    generator = torch.Generator().manual_seed(3)
    logits, labels = torch.randn(2, 5, 12, generator=generator), torch.randint(0, VOCAB, (2, 5), generator=generator)
    keep = torch.tensor([[True, False, True, True, False], [False] * 5])
    whole = logits.clone().requires_grad_()
    expected = [values.where(keep, 0.0) for values in reference(whole, labels, 1.0)]
    (expected[0].sum() + expected[1].sum()).backward()
    found = pool.run(world_size, ignoring, logits, labels, keep)
    for log_prob, entropy, _ in found:
        torch.testing.assert_close(log_prob, expected[0].detach())
        torch.testing.assert_close(entropy, expected[1].detach())
    gradient = torch.cat([grad for _, _, grad in found], -1)
    torch.testing.assert_close(gradient, whole.grad)
    assert not gradient[~keep].any()


CALLS = {
    r"labels must be 0 to 10, or -100 .* found 0 to 11": {"labels": torch.tensor([0, 11])},
    r"labels must be 0 to 10, or -100 .* found -1 to 3": {"labels": torch.tensor([-1, 3])},
    "labels must be an int64 tensor on cpu, found <torch.int32 of shape": {
        "labels": torch.tensor([1, 2], dtype=torch.int32)
    },
    r"labels must be an int64 tensor on cpu, found \[": {"labels": [1, 2]},
    "logits must be a tensor of floats .* found None": {"logits": None},
    "logits must be a tensor of floats .* found <torch.int64": {"logits": torch.zeros(2, 8, dtype=torch.long)},
    r"logits must have the shape of labels, \(2,\), .* found \(3, 8\)": {"logits": torch.zeros(3, 8)},
    "vocab_size must be 1 to 16, .* found 1.5": {"vocab_size": 1.5},
    "temperature must be a number .* found None": {"temperature": None},
    "same labels on every rank, found rank 0 .*; rank 1 of the job: labels=": {"labels": torch.tensor([1, 3])},
    "same vocab_size on every rank, .* rank 1 of the job: vocab_size=9": {"vocab_size": 9},
    "same temperature on every rank, .* temperature=0.5": {"temperature": 0.5},
}


def wrong_calls():
    """The errors of both ranks if the second rank has another argument than the first."""
    said, usual = [], {"logits": torch.zeros(2, 8), "labels": torch.tensor([1, 2]), "vocab_size": VOCAB}
    for other in CALLS.values():
        with pytest.raises(BatchError) as caught:
            mb.log_probs(**{**usual, **(other if dist.get_rank() else {})}, group=dist.group.WORLD)
        said.append(str(caught.value))
    with pytest.raises(BatchError, match="group must be the tensor-parallel process group, found NoneType"):
        mb.log_probs(**usual, group=None)
    return said


def test_ranks_with_other_labels_or_arguments_all_raise():
    first, second = pool.run(2, wrong_calls, timeout=60)
    for words, heard, own in zip(CALLS, first, second, strict=True):
        assert re.search(words, own), own
        assert re.search(words, heard), heard
