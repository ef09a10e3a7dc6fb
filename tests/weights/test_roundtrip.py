"""HF to every rank's real ``GPTModel`` and back, bit for bit, on any mesh and for any bucket size."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_bridge import ParallelDims
from mcore_bridge.rules.spec import ALIGNMENT
from mcore_bridge.weights.load import load_hf_weights
from mcore_bridge.weights.plan.export_plan import MESSAGES_IN_FLIGHT
from mcore_bridge.weights.plan.schedule import MIN_WINDOW
from mcore_bridge.weights.plan.stream import HEADER
from tests.support import fake_mesh
from tests.support.round_trips import check
from tests.support.strategies import problems, random_state, tiny


@settings(max_examples=40)
@given(problems(), st.sampled_from([1, 1000, 1 << 14, 1 << 30]))
def test_any_model_on_any_mesh(problem, bucket_bytes):
    check(*problem, bucket_bytes=bucket_bytes)


@pytest.mark.slow
@settings(max_examples=600)
@given(problems(), st.sampled_from([1, 1000, 1 << 14, 1 << 30]))
def test_any_model_on_any_mesh_at_length(problem, bucket_bytes):
    check(*problem, bucket_bytes=bucket_bytes)


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_qkv_geometries(family, tp, groups):
    """KV heads fewer than, equal to and more than tp; biases; explicit head_dim."""
    bias = {} if family == "qwen2" else {"attention_bias": True}
    check(tiny(family, num_key_value_heads=groups, num_hidden_layers=1, **bias), ParallelDims(tp=tp))


@pytest.mark.parametrize("vocab", [96, 97, 101])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dims", [ParallelDims(tp=2), ParallelDims(tp=8), ParallelDims(tp=4, pp=2)], ids=str)
def test_vocabularies_that_tp_does_not_divide(vocab, tied, dims):
    """Padding is zero in the model, and is not in the export."""
    hf = tiny("llama", vocab_size=vocab, tie_word_embeddings=tied, num_hidden_layers=2)
    check(hf, dims)
    state = random_state(hf)
    held = fake_mesh.build_everywhere(hf, dims, lambda chunks: load_hf_weights(chunks, state), dtype=torch.float32)
    whole = torch.cat([bound.tensors["embedding.word_embeddings.weight"] for bound, _ in held[: dims.tp]])
    assert whole.shape[0] % dims.tp == 0
    assert (whole[vocab:] == 0).all()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(pp=4),
        ParallelDims(pp=2, vp=2),
        ParallelDims(tp=2, pp=2, vp=3, layout="E|t||tt|t|L"),
        ParallelDims(pp=4, layout="E|tt|tt|L"),
        ParallelDims(pp=4, layout="Etttt|||L"),
    ],
    ids=str,
)
def test_tied_embeddings_and_empty_stages(dims, tied):
    check(tiny("qwen3", tie_word_embeddings=tied), dims)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_crosses_bit_for_bit(dtype):
    check(tiny("qwen3"), ParallelDims(tp=2, pp=2), dtype=dtype)


@settings(max_examples=25)
@given(problems(), st.integers(1, 1 << 15))
def test_what_engines_fuse_comes_together_and_the_manifest_is_known_first(problem, bucket_bytes):
    """q, k, v complete with one message, and so do gate and up. Names, shapes and order are equal in every rank's
    plan.
    """
    hf, dims = problem
    state = random_state(hf)
    held = fake_mesh.build_everywhere(hf, dims, lambda chunks: load_hf_weights(chunks, state), dtype=torch.float32)
    plan = fake_mesh.plan_of(held, bucket_bytes=bucket_bytes)
    assert [spec.name for spec in plan.tensors()] == list(fake_mesh.export(held, bucket_bytes=bucket_bytes))
    assert {spec.name: spec.shape for spec in plan.tensors()} == {n: tuple(t.shape) for n, t in state.items()}
    message_of = {plan.payload.outputs[i].name: n for n, message in enumerate(plan.messages) for i in message.done}
    for name, index in message_of.items():
        for fused in (("q_proj", "k_proj"), ("k_proj", "v_proj"), ("gate_proj", "up_proj")):
            if fused[0] in name:
                assert message_of[name.replace(*fused)] == index
    row = max(entry.row_bytes for entry in plan.payload.entries)
    for message in plan.messages[:-1]:
        sending = [width for width in message.widths if width > HEADER] or [HEADER]
        window = max(bucket_bytes // MESSAGES_IN_FLIGHT // len(sending), MIN_WINDOW, row + HEADER)
        assert max(sending) <= window + ALIGNMENT


def test_replicas_send_once():
    """A norm that every tensor-parallel rank holds is sent by one rank only."""
    hf = tiny("llama", num_hidden_layers=1)
    state = random_state(hf)
    held = fake_mesh.build_everywhere(
        hf, ParallelDims(tp=4), lambda chunks: load_hf_weights(chunks, state), dtype=torch.float32
    )
    plan = fake_mesh.plan_of(held, bucket_bytes=1 << 20)
    (message,) = plan.messages
    sent = Counter(plan.payload.entries[piece.entry].held.name for piece in message.pieces)
    assert sent["decoder.final_layernorm.weight"] == 1
    assert sent["decoder.layers.0.mlp.linear_fc1.weight"] == 4
