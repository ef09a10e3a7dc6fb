"""The pieces of all ranks make up every HF tensor, and agree where they overlap."""

import pytest
import torch
from hypothesis import given, settings

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from mcore_bridge.launch.fake_rank import rank_of
from tests import zoo
from tests.support import fake_mesh
from tests.support.pieces import merged
from tests.support.strategies import problems, random_state


def check(hf, dims, **arguments):
    state = random_state(hf)
    pieces = []

    def load(chunks):
        mb.load_hf_weights(chunks, state)
        pieces.extend(mb.iter_hf_shards(chunks, **arguments))

    fake_mesh.build_everywhere(hf, dims, load, dtype=torch.float32)
    return state, merged(pieces)


def assert_whole(state, found):
    assert found.keys() == state.keys()
    for name, whole in found.items():
        assert torch.equal(whole, state[name]), name


@settings(max_examples=20)
@given(problems())
def test_pieces_of_all_ranks_make_up_the_model(problem):
    assert_whole(*check(*problem))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "phi3"])
@pytest.mark.parametrize("dims", [ParallelDims(tp=2, sp=True), ParallelDims(tp=2, pp=2, ep=2, sp=True)], ids=str)
def test_experts_latents_transposed_and_fused_ones_too(name, dims):
    hf = zoo.cases()[name].hf
    if not getattr(hf, "num_experts", None) and not hf.to_dict().get("n_routed_experts") and dims.ep > 1:
        dims = ParallelDims(tp=2, pp=2, sp=True)
    assert_whole(*check(hf, dims))


def test_a_piece_is_the_live_parameter():
    hf = zoo.cases()["qwen3_moe"].hf
    seen = []

    def load(chunks):
        mb.load_hf_weights(chunks, random_state(hf))
        pieces = {piece.name: piece for piece in mb.iter_hf_shards(chunks)}
        with torch.no_grad():
            chunks[0].decoder.final_layernorm.weight.fill_(7)
        seen.append(pieces["model.norm.weight"].tensor)

    fake_mesh.build_everywhere(hf, ParallelDims(), load, dtype=torch.float32)
    assert (seen[0] == 7).all()


def test_the_format_can_be_asked_for():
    state, found = check(zoo.cases()["qwen3_moe"].hf, ParallelDims(ep=2, pp=2), expert_format="fused")
    names = {name for name in found if ".experts." in name}
    assert {name.rpartition(".")[2] for name in names} == {"gate_up_proj", "down_proj"}
    for name in names:
        assert not found[name].isnan().any()
    one = next(name for name in names if name.endswith("gate_up_proj"))
    prefix = one.removesuffix("gate_up_proj")
    for expert in range(found[one].shape[0]):
        both = torch.cat([state[f"{prefix}{expert}.{part}_proj.weight"] for part in ("gate", "up")])
        assert torch.equal(found[one][expert], both)


def test_models_without_memory_have_no_pieces():
    with rank_of(ParallelDims(), 0, 1):
        models = mb.build_model(zoo.cases()["llama"].hf, dims=ParallelDims(), device="meta", load_weights=False)
        with pytest.raises(mb.BridgeError, match="has no storage: it is on the meta device"):
            list(mb.iter_hf_shards(models))
