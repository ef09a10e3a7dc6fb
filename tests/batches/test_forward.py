"""``forward`` on any mesh: log-probs, entropies and values of a batch equal those from transformers' logits."""

import contextlib
import re
from functools import cache, partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

import mcore_bridge as mb
from mcore_bridge.batches import microbatches, packing, refusals
from mcore_bridge.batches.microbatches import balances_experts, tokens_in_fp8
from mcore_bridge.errors import BatchError, BridgeError, ConfigError, MeshError
from tests import zoo
from tests.support import pool, stepping
from tests.support.forward_batches import FAMILIES, LENGTHS, batch_of, expected_of
from tests.support.parity import BATCH, LONG, reference_of
from tests.support.shared_jobs import results
from tests.support.strategies import random_state, tiny

BOUND = 2e-5  # relative to the spread of logits, as in test_parity.py
assert len(LENGTHS) == BATCH


def run(hf, dims, ways):
    """The outputs of this rank for each way to run one batch, or the error that refused the mesh."""
    stepping.meet(dims)
    try:
        models = mb.build_model(hf, dims=dims, dtype=torch.float32, device="cpu", load_weights=random_state(hf))
        for model in models:
            model.eval()
        found = [mb.forward(models, *batch_of(hf), **options) for options in ways]
    except (ConfigError, MeshError) as error:
        return str(error)
    return [(each.log_probs, each.entropy) for each in found]


def check(name, dims, *ways):
    """Compare on every rank, or return the error that refused the mesh."""
    ranks = pool.run(dims.smallest_world, run, zoo.cases()[name].hf, dims, ways)
    return compare(name, ranks, ways)


def compare(name, ranks, ways=({},)):
    """As ``check``, with what each rank has found."""
    reference, hf = reference_of(name), zoo.cases()[name].hf
    for found in ranks:
        if isinstance(found, str):
            return found
        for outputs, options in zip(found, ways, strict=True):
            expected = expected_of(reference, hf, options.get("temperature", 1.0))
            for ours, theirs in zip(outputs, expected, strict=True):
                assert float((ours - theirs).abs().max() / reference.std()) < BOUND, options
    return ""


def case_of(name, dims):
    return zoo.cases()[name].hf, dims, [{}]


NAMES = ["mistral-window", *FAMILIES.values()]


@pytest.mark.parametrize("name", NAMES)
def test_packed_sequences_of_every_family(name):
    """Each mesh also runs with context parallelism, unless the family refuses it."""
    if refusal := compare(name, results(run, case_of, mb.ParallelDims(cp=2), name, NAMES)):
        assert "context parallel" in refusal
        assert not check(name, mb.ParallelDims(), {})


MESHES = [
    mb.ParallelDims(tp=2, sp=True),
    mb.ParallelDims(cp=2),
    mb.ParallelDims(tp=2, cp=2, sp=True),
    mb.ParallelDims(tp=2, cp=2),
    mb.ParallelDims(pp=2),
    mb.ParallelDims(pp=2, vp=2),
    mb.ParallelDims(tp=2, pp=2, sp=True),
]


PACKED_AND_ROWS = [{"packed": packed, "micro_batch_size": 1} for packed in (True, False)]


@pytest.mark.parametrize("dims", MESHES, ids=str)
def test_every_mesh(dims):
    assert not check("qwen3", dims, *PACKED_AND_ROWS)


@pytest.mark.parametrize("dims", [mb.ParallelDims(tp=2, cp=2, sp=True), mb.ParallelDims(pp=2, vp=2)], ids=str)
@pytest.mark.parametrize(
    "name", zoo.params(["gemma4", "gemma4-experts", "gemma4-shared", "mimo_v2_flash-biased", "inkling-three-shared"])
)
def test_layers_with_heads_of_different_sizes(name, dims):
    refusal = check(name, dims, *PACKED_AND_ROWS)
    assert ("pp=2 must be 1" in refusal) if (name, dims.pp) == ("gemma4-shared", 2) else not refusal


@pytest.mark.parametrize("dims", [mb.ParallelDims(ep=2), mb.ParallelDims(tp=2, ep=2, sp=True)], ids=str)
def test_experts_on_other_ranks(dims):
    assert not check("qwen3_moe", dims, {})


def test_ranks_that_do_not_divide_megatrons_table_of_positions():
    """It has 4096 places for latent attention, which three ranks cannot divide into sixths."""
    assert not check("deepseek_v3", mb.ParallelDims(cp=3), {})


def of_replicas(dims, dispatcher, batches, ways):
    """The outputs of this rank's replica for the rows with these numbers, in each way, or an error."""
    hf = zoo.cases()["qwen3_moe"].hf
    with stepping.mesh(dims):
        how = {"dims": dims, "dtype": torch.float32, "device": "cpu", "load_weights": random_state(hf)}
        models = mb.build_model(hf, **how, overrides={"moe_token_dispatcher_type": dispatcher})
        rows = batches[parallel_state.get_data_parallel_rank()]
        batch = [each[rows] for each in batch_of(hf)]
        try:
            return rows, [mb.forward(models, *batch, **options).log_probs for options in ways]
        except BatchError as error:
            return str(error)


BALANCED = {
    "aux_loss": ("qwen3_moe", {"moe_aux_loss_coeff": 0.05, "moe_router_load_balancing_type": "aux_loss"}),
    "seq_aux_loss": ("qwen3_moe", {"moe_aux_loss_coeff": 0.05, "moe_router_load_balancing_type": "seq_aux_loss"}),
    "z_loss": ("qwen3_moe", {"moe_z_loss_coeff": 0.05}),
    "bias": ("deepseek_v3", {"moe_router_bias_update_rate": 1e-3}),
    "softmax bias": ("ernie4_5_moe", {"moe_router_bias_update_rate": 1e-3}),
}


def balanced(kind, dims, ways):
    """Gradients of routers and tokens of each expert, for one batch that is padded in several ways."""
    name, overrides = BALANCED[kind]
    hf, found = zoo.cases()[name].hf, []
    with stepping.mesh(dims):
        how = {"dims": dims, "dtype": torch.float32, "device": "cpu", "load_weights": random_state(hf)}
        for options in ways:
            models = mb.build_model(hf, **how, overrides=overrides)
            wrapped = stepping.wrap(models)
            models[0].config.finalize_model_grads_func = None  # the padding also moves tokens to other places
            try:
                mb.forward(wrapped, *batch_of(hf), loss=lambda out, rows: out.log_probs.sum() * 0, **options)
            except BatchError as error:
                return str(error)
            routers = [module for chunk in models for name, module in chunk.named_modules() if name.endswith("router")]
            learnt = [router.weight.main_grad for router in routers]
            counts = [router.local_tokens_per_expert for router in routers if router.expert_bias is not None]
            for each in (*learnt, *counts):
                torch.distributed.all_reduce(each, group=models[0].pg_collection.tp_cp)
            found.append([each.clone() for each in (counts or learnt)])
    return found


@pytest.mark.parametrize(
    "dims", [mb.ParallelDims(), mb.ParallelDims(tp=2, sp=True), mb.ParallelDims(tp=2, pp=2, sp=True)], ids=str
)
@pytest.mark.parametrize("kind", BALANCED)
def test_routers_learn_nothing_from_padding(kind, dims):
    """All padding is one token, so all of it would go to the same experts. If ranks have parts of a sequence, z_loss is
    the mean of the means of the ranks, so it depends on the cuts.
    """
    if kind == "z_loss" and dims.sp:
        pytest.skip("megatron-core takes the mean of each rank's tokens")
    packed = [{"multiple_of": 1}, {"multiple_of": 64}, {"multiple_of": 64, "packed": False}]
    ways = packed[:2] if kind == "seq_aux_loss" else packed  # for rows, the loss is a mean over them
    for found in pool.run(dims.smallest_world, balanced, kind, dims, [{"micro_batch_size": 1, **way} for way in ways]):
        first, *others = found
        assert first
        assert all(float(each.abs().sum()) > 0 for each in first)
        for other in others:
            for known, each in zip(first, other, strict=True):
                torch.testing.assert_close(each, known, rtol=1e-4, atol=1e-7)


def test_microbatches_of_padding_alone_are_refused_where_they_would_be_divided_by():
    dims = mb.ParallelDims(pp=2, vp=2)
    message = "each microbatch must have a token, found"
    assert all(message in found for found in pool.run(2, balanced, "aux_loss", dims, [{"micro_batch_size": 3}]))


SHARED = [mb.ParallelDims(ep=2), mb.ParallelDims(tp=2, ep=4, sp=True), mb.ParallelDims(pp=2, ep=2)]


@pytest.mark.parametrize("dims", SHARED, ids=str)
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_replicas_that_share_experts_have_tokens_of_their_own(dispatcher, dims):
    """The batches have different lengths: one dispatcher of megatron-core supports this, the other would hang."""
    hf, reference = zoo.cases()["qwen3_moe"].hf, reference_of("qwen3_moe")
    expected, _ = expected_of(reference, hf)
    ways = [{"packed": True}, {"packed": False}]
    for rows, found in pool.run(dims.smallest_world, of_replicas, dims, dispatcher, [[0], [1]], ways):
        assert len(found) == len(ways)
        for log_probs in found:
            assert float((log_probs - expected[rows]).abs().max() / reference.std()) < BOUND


@pytest.mark.parametrize(
    ("dispatcher", "options", "words"),
    [
        ("alltoall", {"micro_batch_size": 1}, "the same number of microbatches, found 1 to 2"),
        ("allgather", {"packed": False}, "the same number of rows in a microbatch, found 1 to 2"),
    ],
)
def test_replicas_that_would_wait_for_each_other_are_refused(dispatcher, options, words):
    assert all(words in found for found in pool.run(2, of_replicas, SHARED[0], dispatcher, [[0], [0, 1]], [options]))


def other_replicas():
    """The errors of both ranks if only one of two replicas that share experts has a loss, or a different mode."""
    hf, said = zoo.cases()["qwen3_moe"].hf, []
    with stepping.mesh(mb.ParallelDims(ep=2)):
        how = {"dims": mb.ParallelDims(ep=2), "dtype": torch.float32, "device": "cpu"}
        models = mb.build_model(hf, **how, load_weights=random_state(hf))
        is_second = dist.get_rank() == 1
        for other, trains in (({"loss": lambda outputs, rows: outputs.log_probs.sum()}, True), ({}, is_second)):
            models[0].train(trains)
            with pytest.raises(BatchError) as caught:
                mb.forward(models, *batch_of(hf), **(other if is_second else {}))
            said.append(str(caught.value))
    return said


def test_replicas_that_share_experts_all_go_back_or_none_does():
    for loss, training in pool.run(2, other_replicas, timeout=60):
        assert "same loss on every rank" in loss
        assert "same training on every rank" in training


RECOMPUTED = {
    "deepseek_v3": ["core_attn", "mla_up_proj", "moe", "shared_experts"],
    "gpt_oss": ["core_attn", "moe"],
    "gemma2": ["core_attn"],
}


def gradients(name, dims):
    """The gradients of all parameters, without recompute and with recompute of some modules."""
    hf, found = zoo.cases()[name].hf, []
    selective = {"recompute_granularity": "selective", "recompute_modules": RECOMPUTED[name]}
    with stepping.mesh(dims):
        how = {"dims": dims, "dtype": torch.float32, "device": "cpu", "load_weights": random_state(hf)}
        for again in ({}, selective):
            models = mb.build_model(hf, **how, overrides=again)
            mb.forward(stepping.wrap(models), *batch_of(hf), loss=lambda out, rows: out.log_probs.sum())
            learnt = {key: each for key, each in models[0].named_parameters() if each.requires_grad}
            found.append({key: each.main_grad.clone() for key, each in learnt.items()})
    return found


@pytest.mark.parametrize("dims", [mb.ParallelDims(), mb.ParallelDims(tp=2, sp=True)], ids=str)
@pytest.mark.parametrize("name", RECOMPUTED)
def test_what_is_computed_again_has_the_same_gradients(name, dims):
    """Recomputed layers have equal gradients, also if attention has sinks or caps, or is latent."""
    for expected, found in pool.run(dims.tp, gradients, name, dims):
        assert sum(float(each.abs().sum()) for each in expected.values()) > 0
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)


BAD = {
    "input_ids must be 0 to 95": torch.full((2, 3), 1 << 20),
    "at least one token, found (2, 0)": torch.zeros(2, 0, dtype=torch.int64),
    "at least one token, found (4,)": torch.zeros(4, dtype=torch.int64),
    "no memory for that": MemoryError("no memory for that"),
}
"""Batches that a replica cannot take, by a part of the message."""


def refused_somewhere(dims):
    """For each bad batch, the error of a rank whose replica, or whose neighbour, has it."""
    hf, said, good = zoo.cases()["qwen3_moe"].hf, [], torch.ones(2, 3, dtype=torch.int64)
    with stepping.mesh(dims):
        how = {"dims": dims, "dtype": torch.float32, "device": "cpu", "load_weights": random_state(hf)}
        models = mb.build_model(hf, **how)
        for bad in BAD.values():
            batch = bad if parallel_state.get_data_parallel_rank() else good
            fails = isinstance(batch, Exception)
            failing = mock.patch("mcore_bridge.batches.forward.micro_batches", side_effect=batch)
            with pytest.raises((BatchError, MemoryError)) as caught, failing if fails else contextlib.nullcontext():
                mb.forward(models, good if fails else batch)
            said.append(str(caught.value))
    return said


@pytest.mark.parametrize("dims", SHARED, ids=str)
def test_a_batch_that_one_replica_cannot_take_raises_on_all_that_share_its_experts(dims):
    ranks = pool.run(dims.smallest_world, refused_somewhere, dims, timeout=60)
    for message, said in zip(BAD, zip(*ranks, strict=True), strict=True):
        assert all(message in each for each in said), said
        assert sum("found a rank that refuses its own, rank" in each for each in said) == len(said) // 2


@pytest.mark.parametrize(
    ("recipe", "unit"), [(None, 1), ("delayed", 16), ("tensorwise", 16), ("blockwise", 128), ("mxfp8", 32)]
)
def test_tokens_are_padded_to_what_fp8_needs(recipe, unit):
    assert tokens_in_fp8(SimpleNamespace(fp8=recipe and "hybrid", fp8_recipe=recipe or "delayed")) == unit


def beyond(token):
    hf = zoo.cases()["qwen3"].hf
    with stepping.mesh(mb.ParallelDims()):
        models = mb.build_model(hf, dims=mb.ParallelDims(), device="cpu", dtype=torch.float32, load_weights=False)
        ids, mask = batch_of(hf)
        mask[0, 0] = 0
        ids[0, 0] = token
        mb.forward(models, ids.clamp(0, hf.vocab_size), mask)
        ids[1, 0] = token
        with pytest.raises(BatchError, match=f"input_ids must be 0 to {hf.vocab_size - 1} .* found"):
            mb.forward(models, ids, mask)


@pytest.mark.parametrize("token", [-1, 10**6])
def test_tokens_beyond_the_vocabulary_are_refused_where_they_count(token):
    pool.run(1, beyond, token)


def test_temperature_and_fp8_sizes():
    assert not check("qwen3", mb.ParallelDims(tp=2, sp=True), {"temperature": 0.6, "multiple_of": 16})


def run_with_mistake(hf, dims, mistake):
    """The result of this rank with a planted mistake."""
    kept = packing._params, packing.lay_out
    try:
        if mistake == "sequences run into each other":
            packing._params = lambda sizes, lengths, device: kept[0]([sum(sizes)], [sum(lengths)], device)
        else:  # context-parallel ranks have exchanged their tokens

            def swapped(*arguments):
                *others, cp, cp_rank = arguments
                return kept[1](*others, cp, cp - 1 - cp_rank)

            packing.lay_out = swapped
        return run(hf, dims, [{}])
    finally:
        packing._params, packing.lay_out = kept


@pytest.mark.parametrize("mistake", ["sequences run into each other", "ranks have each other's tokens"])
def test_a_mistake_would_be_seen(mistake):
    hf, reference = zoo.cases()["qwen3"].hf, reference_of("qwen3")
    for ((found, _),) in pool.run(2, run_with_mistake, hf, mb.ParallelDims(cp=2), mistake):
        assert float((found - expected_of(reference, hf)[0]).abs().max() / reference.std()) > 50 * BOUND


# backward -------------------------------------------------------------------------------------------------------------

HF = tiny("qwen3", num_key_value_heads=2, num_hidden_layers=4, vocab_size=97)


def weights_of(shape):
    """The weights of each token's log-probability and entropy in a loss."""
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(5))


def loss_of(log_probs, entropies, rows):
    of_log_probs, of_entropies = weights_of((BATCH, LONG))[:, rows]
    return (log_probs * of_log_probs + entropies * of_entropies).sum()


def by_forward(dims, ways):
    """Gradients that ``forward`` leaves in mcore's DDP, by HF name, for each way to run one batch."""
    gradients = []
    with stepping.mesh(dims):
        for options in ways:
            chunks = mb.build_model(HF, dims=dims, dtype=torch.float32, device="cpu", load_weights=random_state(HF))
            found = mb.forward(
                stepping.wrap(chunks),
                *batch_of(HF),
                loss=lambda outputs, rows: loss_of(outputs.log_probs, outputs.entropy, rows),
                **options,
            )
            assert not found.log_probs.requires_grad
            gradients.append(gradients_of(chunks, "main_grad"))
    return gradients


def by_hand():
    """Gradients and outputs of one rank, which passes each row to the model without padding and microbatches."""
    ids, _ = batch_of(HF)
    with stepping.mesh(mb.ParallelDims()):
        (model,) = mb.build_model(HF, dtype=torch.float32, device="cpu", load_weights=random_state(HF))
        loss = torch.zeros(())
        for row, length in enumerate(LENGTHS):
            own = ids[row : row + 1, LONG - length :]
            logs = torch.log_softmax(model(own, torch.arange(length)[None], None)[0, :-1], -1)
            log_probs, entropies = torch.zeros(1, LONG), torch.zeros(1, LONG)
            log_probs[0, LONG - length + 1 :] = logs.gather(-1, own[0, 1:, None])[:, 0]
            entropies[0, LONG - length + 1 :] = -(logs.exp() * logs).sum(-1)
            loss = loss + loss_of(log_probs, entropies, slice(row, row + 1))
        loss.backward()
        return gradients_of([model], "grad")


def gradients_of(chunks, name):
    """Gradients have the places of their parameters, so that the export gives them HF names."""
    with torch.no_grad():
        for parameter in [each for chunk in chunks for each in chunk.parameters()]:
            parameter.copy_(getattr(parameter, name))
    return {name: tensor.clone() for name, tensor in mb.to_hf_state_dict(chunks).items()}


@cache
def alone(function, *args):
    """What one rank finds, which several meshes are compared with."""
    return pool.run(1, function, *args)[0]


@pytest.mark.parametrize("dims", MESHES, ids=str)
def test_gradients_are_those_of_unpadded_rows(dims):
    """The mean over two microbatches, or one microbatch with both rows; virtual stages then add one of padding."""
    expected = alone(by_hand)
    ways = [{"packed": packed, "micro_batch_size": size} for packed in (True, False) for size in (1, BATCH)]
    for found in pool.run(dims.smallest_world, by_forward, dims, ways):
        for options, gradients in zip(ways, found, strict=True):
            assert gradients.keys() == expected.keys()
            for name, gradient in expected.items():
                mean = gradients[name] * (BATCH // options["micro_batch_size"])
                assert (mean - gradient).abs().max() < 1e-4 * gradient.abs().max(), (name, options)


UNEVEN = torch.tensor([7, 3, 6])
"""Lengths of three rows of seven tokens. No microbatch size and no mesh divides three or seven."""
SIZES = [
    (mb.ParallelDims(), 2, True),
    (mb.ParallelDims(pp=2, vp=2), 1, True),  # the rounds need four microbatches, so one has only padding
    (mb.ParallelDims(pp=2, vp=2), 2, False),
    (mb.ParallelDims(pp=2), 2, True),
    (mb.ParallelDims(cp=2), 2, False),
    (mb.ParallelDims(cp=2, pp=2), 2, True),
    (mb.ParallelDims(cp=2, pp=2), 2, False),
    (mb.ParallelDims(cp=2, pp=2, vp=2), 1, True),
]


def uneven_batch():
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, HF.vocab_size, (3, 7), generator=generator)
    return ids, torch.arange(7) < UNEVEN[:, None], torch.randn(2, 3, 7, generator=generator)


def uneven_loss(log_probs, entropies, rows):
    """A mean over all places of a microbatch, so that rows of padding would change it."""
    of_log_probs, of_entropies = uneven_batch()[2][:, rows]
    return (log_probs * of_log_probs + entropies * of_entropies).mean()


def uneven_by_forward(dims, size, packed):
    """Outputs of a mesh for three rows, and the gradients."""
    ids, mask, _ = uneven_batch()
    with stepping.mesh(dims):
        chunks = mb.build_model(HF, dims=dims, dtype=torch.float32, device="cpu", load_weights=random_state(HF))
        options = {"micro_batch_size": size, "packed": packed}
        loss = {"loss": lambda outputs, rows: uneven_loss(outputs.log_probs, outputs.entropy, rows)}
        found = mb.forward(stepping.wrap(chunks), ids, mask, **loss, **options)
        return found.log_probs, found.entropy, gradients_of(chunks, "main_grad")


def uneven_by_hand(size):
    """Outputs and gradients of one rank, which passes each row to the model without padding."""
    ids, _, _ = uneven_batch()
    with stepping.mesh(mb.ParallelDims()):
        (model,) = mb.build_model(HF, dtype=torch.float32, device="cpu", load_weights=random_state(HF))
        rows = []
        for row, length in enumerate(UNEVEN.tolist()):
            own = ids[row : row + 1, :length]
            logs = torch.log_softmax(model(own, torch.arange(length)[None], None)[0, :-1], -1)
            values = logs.gather(-1, own[0, 1:, None])[:, 0], -(logs.exp() * logs).sum(-1)
            rows.append(torch.stack([torch.nn.functional.pad(each, (1, 7 - length)) for each in values]))
        outputs = torch.stack(rows, 1)
        slices = [slice(start, min(start + size, 3)) for start in range(0, 3, size)]
        sum(uneven_loss(*outputs[:, part], part) / len(slices) for part in slices).backward()
        return *outputs.detach(), gradients_of([model], "grad")


@pytest.mark.parametrize(("dims", "size", "packed"), SIZES, ids=str)
def test_three_rows_that_no_microbatch_and_no_mesh_divides(dims, size, packed):
    """Outputs equal the outputs of each row alone, and gradients the gradients of the mean over microbatches."""
    expected = alone(uneven_by_hand, size)
    for found in pool.run(dims.smallest_world, uneven_by_forward, dims, size, packed):
        for ours, theirs in zip(found[:2], expected[:2], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
        for name, gradient in expected[2].items():
            assert (found[2][name] - gradient).abs().max() < 1e-4 * gradient.abs().max(), name


def values_of(dims, hf, head):
    with stepping.mesh(dims):
        state = random_state(hf)
        models = mb.build_model(hf, dims=dims, dtype=torch.float32, device="cpu", head=head, load_weights=state)
        for model in models:
            for parameter in model.output_layer.parameters() if model.post_process else ():
                torch.nn.init.constant_(parameter, 0.5)
            model.eval()
        ids, mask = batch_of(hf)
        found = mb.forward(models, ids, mask)
        assert found.log_probs is None
        if dims.pp * dims.cp > 1:
            return found.values, None
        with torch.no_grad():
            rows = [ids[row : row + 1, LONG - length :] for row, length in enumerate(LENGTHS)]
            return found.values, [models[0](row, torch.arange(row.size(1))[None], None)[0] for row in rows]


@pytest.mark.parametrize("head", ["value", "classification", "process_reward"])
def test_what_a_head_says_is_at_its_token(head):
    hf = tiny("qwen3", num_key_value_heads=2, num_labels=3)
    ((found, rows),) = pool.run(1, values_of, mb.ParallelDims(), hf, head)
    assert found.shape == ((BATCH, LONG) if head == "value" else (BATCH, LONG, 3))
    for values, row, length in zip(found, rows, LENGTHS, strict=True):
        torch.testing.assert_close(values[LONG - length :].view(row.shape), row)
        assert not values[: LONG - length].any()
    for other, _ in pool.run(4, values_of, mb.ParallelDims(cp=2, pp=2), hf, head):
        torch.testing.assert_close(other, found)


def of_a_user(out, rows):
    """A loss that fails only on one tensor rank, and only in the second microbatch."""
    if rows.start and not parallel_state.get_tensor_model_parallel_rank():
        raise KeyError("of a user")
    return None if rows.start else out.entropy.sum()


LOSSES = {
    r"scalar tensor .* found torch.float32 of shape \(1, 40\)": lambda out, rows: out.log_probs,
    "scalar tensor .* found tuple": lambda out, rows: (out.log_probs.sum(), {}),
    "scalar tensor .* found NoneType": lambda out, rows: None,
    "scalar tensor .* found float": lambda out, rows: out.log_probs.sum().item(),
    "scalar tensor .* found a loss that sends no gradient": lambda out, rows: out.log_probs.detach().sum(),
    "scalar .* sends no gradient": lambda out, rows: torch.ones((), requires_grad=True) * 2,
    "of a user": of_a_user,
}


def losses_that_are_none(dims):
    """The outcome of each call on this rank. All ranks make all calls."""
    with stepping.mesh(dims):
        chunks = mb.build_model(HF, dims=dims, dtype=torch.float32, device="cpu", load_weights=random_state(HF))
        wrapped, found = stepping.wrap(chunks), []
        for loss in LOSSES.values():
            with pytest.raises((BatchError, KeyError)) as refused:
                mb.forward(wrapped, *batch_of(HF), loss=loss, micro_batch_size=1)
            found.append(str(refused.value))
        mb.forward(wrapped, *batch_of(HF), loss=lambda out, rows: out.log_probs[:, :0].sum(), micro_batch_size=1)
        return found, parallel_state.is_pipeline_last_stage(), parallel_state.get_tensor_model_parallel_rank()


@pytest.mark.parametrize("dims", [mb.ParallelDims(), mb.ParallelDims(tp=2, pp=2)], ids=str)
def test_a_loss_that_is_none_raises_on_all_ranks(dims):
    for found, is_last, tp_rank in pool.run(dims.smallest_world, losses_that_are_none, dims, timeout=60):
        for message, words in zip(found, LOSSES, strict=True):
            knows = is_last and (words != "of a user" or not tp_rank)
            other = "scalar tensor .* found NoneType" if is_last else "the loss or the images failed on another rank"
            assert re.search(words if knows else other, message), message


TURNED, LATE = "turned", "late"
OTHERS = {
    r"same input_ids on every rank, found .*input_ids='int64 .*; distribute batches": {"input_ids": TURNED},
    "same input_ids on": {"input_ids": LATE, "attention_mask": None},
    "same micro_batch_size on .* of the job: micro_batch_size=2;.*pass one value$": {"micro_batch_size": 2},
    "same temperature on .*: temperature=0.5;.*pass one value$": {"temperature": 0.5},
    "same packed on .*: packed=False;": {"packed": False},
    "same multiple_of on .*: multiple_of=16;": {"multiple_of": 16},
    "same loss on .*: loss='given'": {"loss": lambda out, rows: out.log_probs.sum()},
    "REFUSED input_ids must be 0 to 96 .* found 0 to 1095": {"input_ids": "beyond"},
    r"REFUSED input_ids must be an int64 tensor on cpu, found \[\[": {"input_ids": "list"},
    r"REFUSED attention_mask must be a tensor on cpu, or None, found \[\[1\]\]": {"attention_mask": [[1]]},
    "REFUSED loss must be a function, or None, found .mean.": {"loss": "mean"},
    "REFUSED micro_batch_size must be a whole number of at least 1, or None, found 1.5": {"micro_batch_size": 1.5},
    "REFUSED packed must be True or False, found 'no'": {"packed": "no"},
    "REFUSED temperature must be a number .* found None": {"temperature": None},
    "REFUSED '/nowhere' must be an existing folder": {"hf": "/nowhere"},
    "REFUSED head must be one of lm, value, classification, process_reward, none, found 'x'": {"head": "x"},
    "REFUSED .*images": {"images": 5},
}


def other_calls(dims):
    """The errors of the ranks of a replica in which the last rank passes another argument than the others."""
    with stepping.mesh(dims):
        chunks = mb.build_model(HF, dims=dims, dtype=torch.float32, device="cpu", load_weights=random_state(HF))
        ids, mask = batch_of(HF)
        is_last, said = dist.get_rank() == dist.get_world_size() - 1, []
        batches = {TURNED: ids.roll(1, 0), LATE: ids[:, 1:], "beyond": ids + 999, "list": ids.tolist()}
        for other in OTHERS.values():
            given = {"input_ids": ids, "attention_mask": mask, "micro_batch_size": 1, **(other if is_last else {})}
            given["input_ids"] = batches[each] if isinstance(each := given["input_ids"], str) else each
            with pytest.raises(BridgeError) as caught:
                mb.forward(chunks, **given)
            said.append(str(caught.value))
        for chunk in chunks:
            chunk.train(is_last)
        with pytest.raises(
            BatchError, match=r"expected the same training on every rank, .*; call train\(\) or eval\(\)"
        ):
            mb.forward(chunks, ids, mask)
        for chunk in chunks:
            chunk.eval()
        mb.forward(chunks, ids.where(mask != 0, 999 if is_last else 0), mask, micro_batch_size=1)
        parameter = next(chunks[0].decoder.layers[0].parameters()).requires_grad_(not is_last)
        differs = "expected the same requires_grad on every rank, found .* of .* parameters"
        with pytest.raises(BatchError, match=differs):
            mb.forward(chunks, ids, mask, micro_batch_size=1, loss=lambda out, rows: out.log_probs.sum())
        parameter.requires_grad_()
        for chunk in chunks:
            chunk.to(torch.bfloat16 if is_last else torch.float32)
        with pytest.raises(BatchError, match=r"expected the same dtype on every rank, found .*dtype=torch\.bfloat16"):
            mb.forward(chunks, ids, mask, micro_batch_size=1)
        return said


@pytest.mark.parametrize("dims", [mb.ParallelDims(tp=2, pp=2), mb.ParallelDims(cp=2)], ids=str)
def test_ranks_of_a_replica_that_call_with_other_arguments_all_raise(dims):
    """All ranks must raise, also ranks whose argument is right: if one raised alone, the others would wait."""
    *others, last = pool.run(dims.smallest_world, other_calls, dims, timeout=60)
    for place, words in enumerate(OTHERS):
        own = words.removeprefix("REFUSED ")
        assert re.search(own, last[place]), last[place]
        for said in others:
            heard = f"refuses its own, rank {len(others)} of the job: " if own != words else ""
            assert re.search(heard + own, said[place]), said[place]


def under_other_defaults():
    """Whether outputs of two stages do not depend on torch's default dtype."""
    dims = mb.ParallelDims(pp=2)
    with stepping.mesh(dims):
        chunks = mb.build_model(HF, dims=dims, dtype=torch.float32, device="cpu", load_weights=random_state(HF))
        ids, mask = batch_of(HF)
        expected, found = mb.forward(chunks, ids, mask).log_probs, []
        for dtype in (torch.bfloat16, torch.float64):
            torch.set_default_dtype(dtype)
            try:
                found.append(mb.forward(chunks, ids, mask).log_probs)
            finally:
                torch.set_default_dtype(torch.float32)
        return [(other.dtype, torch.equal(other, expected)) for other in found]


def test_outputs_do_not_depend_on_torchs_default_dtype():
    assert pool.run(2, under_other_defaults, timeout=60) == [[(torch.float32, True)] * 2] * 2


def other_chunks(folder):
    """The outcomes of calls in which the last rank, or every rank, passes wrong chunks, in the order of calls."""
    dims, said = mb.ParallelDims(pp=2, vp=2), []
    with stepping.mesh(dims):
        chunks = mb.build_model(HF, dims=dims, dtype=torch.float32, device="cpu", load_weights=random_state(HF))
        ids = batch_of(HF)[0]
        for others in (chunks[:1], chunks[::-1], chunks[1:] * 2):
            for models in (others, others if dist.get_rank() else chunks):
                for call in (
                    partial(mb.forward, models, ids),
                    partial(mb.save_checkpoint, models, folder),
                    partial(mb.load_checkpoint, models, folder),
                    partial(mb.add_adapters, models, rank=1, alpha=1, targets=["q_proj"]),
                ):
                    with pytest.raises(BridgeError) as caught:
                        call()
                    said.append(str(caught.value))
        mb.forward(chunks, ids)
    return said


def test_chunks_that_are_absent_or_in_another_order_are_refused_on_all_ranks(tmp_path):
    """A schedule would wait forever, and a checkpoint would lack layers."""
    for found in pool.run(2, other_chunks, str(tmp_path / "out"), timeout=60):
        for text in found:
            assert re.search(r"models must be the chunks of the 2 .* found .* \[(0|1, 0|1, 1)\]: pass", text), text


def test_what_does_not_fit_is_refused():
    with pytest.raises(BatchError, match="at least one token, found"):
        pool.run(1, refused)


def refused():
    with stepping.mesh(mb.ParallelDims()):
        models = mb.build_model(HF, dtype=torch.float32, device="cpu", load_weights=False)
        ids = torch.zeros(2, 4, dtype=torch.long)
        with pytest.raises(BatchError, match=r"must be \[batch, seq\] with at least one token, found \(1, 2, 4\)"):
            mb.forward(models, ids[None])
        with pytest.raises(BatchError, match=r"must have the shape of input_ids, \(2, 4\), found \(3, 4\)"):
            mb.forward(models, ids, torch.ones(3, 4))
        with pytest.raises(BatchError, match=r"input_ids must be an int64 .* found <torch\.float32 of shape"):
            mb.forward(models, ids.float())
        with pytest.raises(BatchError, match=r"input_ids must be an int64 tensor on cpu, found \[\["):
            mb.forward(models, ids.tolist())
        with pytest.raises(BatchError, match="loss must be a function, or None, found "):
            mb.forward(models, ids, loss=1.0)
        with pytest.raises(
            BatchError, match="micro_batch_size must be a whole number of at least 1, or None, found -1"
        ):
            mb.forward(models, ids, micro_batch_size=-1)
        for temperature in (0, True, None, "1", -1.0, float("nan"), float("inf"), torch.ones(2)):
            with pytest.raises(BatchError, match="temperature must be a number of at least 1e-06, found"):
                mb.forward(models, ids, temperature=temperature)
        added = torch.zeros(2, 4).masked_fill(torch.arange(4) > 2, -1e9)
        for mask in (added, added.to(torch.bfloat16), torch.ones(2, 4, dtype=torch.int32) * torch.arange(4)):
            with pytest.raises(BatchError, match=r"attention_mask must be 1 or True .* pass mask == 0"):
                mb.forward(models, ids, mask)
            with pytest.raises(BatchError, match="attention_mask must be 1 or True"):
                mb.pack_sequences(ids, mask)
        for mask in (added == 0, (added == 0).float()):
            mb.forward(models, ids, mask)
        models[0].config.context_parallel_size, models[0].config.cp_comm_type = 2, "all_gather"
        with pytest.raises(BatchError, match="cp_comm_type='all_gather' sequences cannot be packed: pass packed=False"):
            mb.forward(models, ids)
        models[0].config.context_parallel_size, models[0].config.mtp_num_layers = 1, 1
        with pytest.raises(BatchError, match="mtp_num_layers must be 0 or None for forward, found 1"):
            mb.forward(models, ids)
        models[0].config.mtp_num_layers, models[0].config.tensor_model_parallel_size = None, 2
        models[0].parallel_output = False
        with pytest.raises(BatchError, match="parallel_output must be True"):
            mb.forward(models, ids)
        models[0].parallel_output, models[0].config.num_moe_experts = True, 4
        for loss in (None, lambda outputs, rows: outputs.log_probs.sum()):
            with pytest.raises(BatchError, match="sp=True to train experts with tp=2, found sp=False"):
                mb.forward(models, ids, loss=loss)
        models[0].config.num_moe_experts = None
        models[0].config.tensor_model_parallel_size = 1
        models[0].config.calculate_per_token_loss = True
        with pytest.raises(BatchError, match="calculate_per_token_loss"):
            mb.forward(models, ids, loss=lambda outputs, rows: outputs.log_probs.sum())
        mb.forward(models, ids[:0])


def on_another_mesh():
    """Runs in a worker: a model whose process has changed to another mesh, where no rank would answer."""
    hf = zoo.cases()["llama"].hf
    built = mb.ParallelDims(tp=2, sp=True)
    built.initialize(device="cpu")
    models = mb.build_model(hf, dims=built, dtype=torch.float32, device="cpu", load_weights=(state := random_state(hf)))
    parallel_state.destroy_model_parallel()
    mb.ParallelDims(pp=2).initialize(device="cpu")
    found = mb.to_hf_state_dict(models)
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.items())
    with pytest.raises(BatchError, match=r"found other ranks.*'tp': \(\[\d\], \[0, 1\]\), 'pp': \(\[0, 1\], \[\d\]\)"):
        mb.forward(models, *batch_of(hf))
    parallel_state.destroy_model_parallel()
    built.initialize(device="cpu")
    return mb.forward(models, *batch_of(hf)).log_probs


def test_a_model_of_another_mesh_is_exported_and_not_run():
    one, other = pool.run(2, on_another_mesh, timeout=60)
    assert torch.equal(one, other)
    assert one.any()


def test_a_bias_that_never_moves_balances_nothing():
    hf = zoo.cases()["deepseek_v3"].hf
    rates = {"moe_aux_loss_coeff": 0.0, "moe_router_bias_update_rate": 0.0}
    assert not balances_experts(mb.to_transformer_config(hf, overrides=rates))
    assert balances_experts(mb.to_transformer_config(hf, overrides={**rates, "moe_router_bias_update_rate": 1e-3}))


def test_routers_of_megatron_core_that_learn_are_refused():
    """Our routers do not count padding. Without gradients, they count no token."""
    rate = {"moe_router_bias_update_rate": 1e-3}
    config = mb.to_transformer_config(zoo.cases()["deepseek_v3"].hf, overrides=rate)
    chunk = SimpleNamespace(config=config, parallel_output=True)
    refusals.require_runnable(chunk, packed=False, learns=False)
    with pytest.raises(BatchError, match="would count padding as tokens"):
        refusals.require_runnable(chunk, packed=False, learns=True)
    chunk.bridge = None
    refusals.require_runnable(chunk, packed=False, learns=True)


def longest_of_different_rows(dispatcher):
    config = SimpleNamespace(num_moe_experts=4, moe_token_dispatcher_type=dispatcher)
    chunk = SimpleNamespace(config=config, pg_collection=SimpleNamespace(tp_ep=dist.group.WORLD))
    rows = 1 + dist.get_rank()
    batch = SimpleNamespace(num_tokens=8 * rows, input_ids=torch.zeros(rows, 8))
    try:
        return microbatches._longest(chunk, [batch])
    except BatchError as error:
        return str(error)


def test_ranks_that_share_experts_may_have_different_rows():
    """Only with the dispatcher "allgather" they may not have different numbers."""
    assert pool.run(2, longest_of_different_rows, "alltoall") == [8, 16]
    for message in pool.run(2, longest_of_different_rows, "allgather"):
        assert "must have the same number of rows in a microbatch, found 1 to 2" in message
