"""The modules of the torch backend alone, and the names that ``enable_cpu`` replaces."""

import math
import multiprocessing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.rotary import HFRotaryEmbedding
from mcore_bridge.factory.modules.torch_modules import CoreAttention, Norm, zigzag
from tests.support import tiny
from tests.support.families import rope_of
from tests.support.module_settings import ALONE, settings

# -- norms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms_are_torchs(normalization, zero_centered):
    norm = Norm(settings(normalization=normalization, layernorm_zero_centered_gamma=zero_centered), 24, eps=1e-3)
    hidden, values = torch.randn(5, 2, 24), torch.randn(24)
    torch.testing.assert_close(norm(hidden), getattr(torch.nn, normalization)(24, eps=1e-3)(hidden))
    norm.weight.data.copy_(values - 1 if zero_centered else values)
    twin = getattr(torch.nn, normalization)(24, eps=1e-3)
    twin.weight.data.copy_(values)
    if norm.bias is not None:
        norm.bias.data.copy_(values)
        twin.bias.data.copy_(values)
    torch.testing.assert_close(norm(hidden), twin(hidden))


def test_norms_carry_the_mark_of_sequence_parallelism_and_refuse_what_they_do_not_compute():
    norm = Norm(settings(normalization="LayerNorm", sequence_parallel=True), 4)
    assert norm.weight.sequence_parallel is True
    assert norm.bias.sequence_parallel is True
    with pytest.raises(ConfigError, match="L2Norm"):
        Norm(settings(normalization="L2Norm"), 4)


# -- attention ---------------------------------------------------------------------------------------------------------


def attention(mask_type: AttnMaskType = AttnMaskType.causal, layer_number: int = 1, **changes: Any) -> CoreAttention:
    return CoreAttention(settings(**changes), layer_number, mask_type, "self", pg_collection=SimpleNamespace(cp=ALONE))


def by_hand(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor) -> Tensor:
    """Attention in fp64, one head at a time. ``hidden`` broadcasts to ``[b, heads, s, t]``."""
    q, k, v = (tensor.double() for tensor in (query, key, value))
    repeats = q.size(2) // k.size(2)
    hidden = hidden.expand(q.size(1), q.size(2), q.size(0), k.size(0))
    heads = []
    for head in range(q.size(2)):
        scores = torch.einsum("sbd,tbd->bst", q[:, :, head], k[:, :, head // repeats]) / math.sqrt(8)
        weights = scores.masked_fill(hidden[:, head], -torch.inf).softmax(-1)
        heads.append(torch.einsum("bst,tbd->sbd", weights, v[:, :, head // repeats]))
    return torch.cat(heads, dim=-1).float()


@given(
    num_queries=st.integers(1, 9),
    cached=st.integers(0, 5),
    heads=st.sampled_from([(1, 1), (4, 1), (4, 2), (3, 3)]),
    window=st.none() | st.integers(0, 9),
    causal=st.booleans(),
    masked=st.booleans(),
)
def test_attention_is_a_softmax_over_what_may_be_seen(num_queries, cached, heads, window, causal, masked):
    num_keys = num_queries + cached
    query, key, value = (
        torch.randn(size, 2, n, 8)
        for size, n in zip((num_queries, num_keys, num_keys), (heads[0], heads[1], heads[1]), strict=True)
    )
    ahead = torch.arange(num_keys) - torch.arange(cached, num_keys)[:, None]
    hidden = torch.zeros_like(ahead, dtype=torch.bool) if not causal else ahead > 0
    if window is not None:
        hidden = hidden | (ahead < -window) | (ahead > 0)
    given_mask = torch.rand(2, 1, num_queries, num_keys) < 0.4 if masked else None
    if given_mask is not None:
        given_mask = given_mask & (ahead != 0)  # a token always attends to itself
        hidden = hidden | given_mask
    core = attention(
        AttnMaskType.causal if causal else AttnMaskType.no_mask,
        window_size=None if window is None else (window, 0),
    )
    found = core(query, key, value, given_mask)
    torch.testing.assert_close(found, by_hand(query, key, value, hidden), rtol=1e-4, atol=1e-5)


def test_windows_follow_the_layer_pattern_and_calls_may_change_the_mask_type():
    query, key, value = (torch.randn(6, 1, 2, 8) for _ in range(3))
    ahead = torch.arange(6) - torch.arange(6)[:, None]
    pattern = {"window_size": (2, 0), "window_attn_skip_freq": [0, 1]}
    full, windowed = (attention(layer_number=number, **pattern)(query, key, value) for number in (1, 2))
    torch.testing.assert_close(full, by_hand(query, key, value, ahead > 0))
    torch.testing.assert_close(windowed, by_hand(query, key, value, (ahead > 0) | (ahead < -2)))
    open_to_all = attention()(query, key, value, attn_mask_type=AttnMaskType.no_mask)
    torch.testing.assert_close(open_to_all, by_hand(query, key, value, ahead > 9))


@pytest.mark.parametrize("causal", [True, False])
def test_a_mask_of_tokens_is_that_of_transformers(causal):
    """Padded rows of a batch attend as each row does alone, with padding on either side."""
    query, key, value = (torch.randn(6, 2, 2, 8) for _ in range(3))
    counting = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    core = attention(AttnMaskType.causal if causal else AttnMaskType.no_mask)
    found = core(query, key, value, counting)
    assert found.isfinite().all()
    for row, tokens in enumerate((slice(2, 6), slice(0, 3))):
        alone = core(*(tensor[tokens, row : row + 1] for tensor in (query, key, value)))
        torch.testing.assert_close(found[tokens, row : row + 1], alone)


def test_a_padded_query_that_sees_nothing_harms_nobody():
    query, key, value = (torch.randn(4, 1, 2, 8, requires_grad=True) for _ in range(3))
    left_padding = torch.tensor([True, True, False, False])[None, None, None]
    output = attention()(query, key, value, left_padding)
    output[2:].sum().backward()
    assert output[2:].isfinite().all()
    assert all(tensor.grad.isfinite().all() for tensor in (query, key, value))


def test_dropout_is_for_training_only_and_the_unsupported_is_refused():
    query, key, value = (torch.randn(6, 1, 2, 8) for _ in range(3))
    core = attention(attention_dropout=0.5, sequence_parallel=True)
    assert not torch.equal(core(query, key, value), core(query, key, value))
    core.eval()
    assert torch.equal(core(query, key, value), attention()(query, key, value))
    with pytest.raises(ConfigError, match="attention_bias"):
        core(query, key, value, attention_bias=query)
    with pytest.raises(ConfigError, match="attention_mask must be None"):
        core(query, key, value, query.bool(), packed_seq_params=object())
    with pytest.raises(ConfigError, match="softmax_type"):
        attention(softmax_type="learnable")


# -- rope --------------------------------------------------------------------------------------------------------------


def rotary(num_ranks: int = 1, rank: int = 0, **rope: Any) -> HFRotaryEmbedding:
    group = SimpleNamespace(size=lambda: num_ranks, rank=lambda: rank)
    return HFRotaryEmbedding(rope_of(tiny.config("llama", **rope)), rotary_interleaved=False, cp_group=group)


@given(num_ranks=st.integers(1, 4), chunk=st.integers(1, 5))
def test_the_angles_of_all_cp_ranks_are_those_of_one(num_ranks, chunk):
    seq_len = 2 * num_ranks * chunk
    whole = rotary()(seq_len).chunk(2 * num_ranks)
    for rank in range(num_ranks):
        expected = torch.cat([whole[index] for index in zigzag(rank, num_ranks)])
        assert torch.equal(rotary(num_ranks, rank)(seq_len), expected)


def test_dynamic_rope_depends_on_the_length_and_not_on_the_past():
    parameters = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    embedding, fresh = rotary(**parameters), rotary(**parameters)
    short, long = embedding(16), embedding(64)
    assert not torch.equal(long[:16], short)
    assert torch.equal(embedding(16), short)
    assert torch.equal(fresh(64), long)
    with pytest.raises(ConfigError, match="multiple of"):
        rotary(2)(6)


# -- enable_cpu --------------------------------------------------------------------------------------------------------

PATCHED = ("current_device", "synchronize", "Stream", "Event", "current_stream", "stream")


def names() -> dict[str, Any]:
    """The current values of all names that ``enable_cpu`` may replace."""
    import importlib

    from megatron.core.tensor_parallel import random

    from mcore_bridge import cpu

    found = {f"torch.cuda.{name}": getattr(torch.cuda, name) for name in PATCHED}
    found["torch.Tensor.cuda"] = torch.Tensor.cuda
    for name in ("CudaRNGStatesTracker", "_get_cuda_rng_state", "_set_cuda_rng_state"):
        found[f"random.{name}"] = getattr(random, name)
    for name in cpu._LITERAL_CUDA:
        found[f"{name}.torch"] = importlib.import_module(f"megatron.core.{name}").torch
    return found


def enable_in_a_fresh_process(connection: Any) -> None:
    import mcore_bridge

    before = names()
    import_changed = [name for name, value in before.items() if ".torch" in name and value is not torch]
    mcore_bridge.enable_cpu()
    once = names()
    mcore_bridge.enable_cpu()
    twice = names()
    connection.send(
        (
            import_changed,
            sorted(name for name in before if before[name] is once[name]),
            sorted(name for name in before if once[name] is not twice[name]),
            torch.cuda.is_available(),
        )
    )


def test_enable_cpu_replaces_its_names_once_and_only_when_it_is_called():
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=enable_in_a_fresh_process, args=(theirs,))
    process.start()
    import_changed, unchanged, changed_again, has_cuda = ours.recv()
    process.join()
    assert import_changed == []
    assert changed_again == []
    assert bool(unchanged) == has_cuda
