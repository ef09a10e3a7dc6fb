"""MTP layers: built or not, in the file or not, in the last stage or in one of their own; one owner of each tensor."""

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from mcore_bridge.errors import CheckpointError
from mcore_bridge.weights.load import load_hf_weights
from tests import fake_mesh, pool, stepping
from tests.strategies import random_state, tiny

LAYERS = 4
MESHES = [
    ParallelDims(),
    ParallelDims(tp=2, sp=True),
    ParallelDims(pp=2),
    ParallelDims(pp=2, vp=2),
    ParallelDims(tp=2, ep=2, sp=True, pp=2),
    ParallelDims(pp=2, layout="balanced"),
    ParallelDims(ep=2, etp=2),
]


def published(num_mtp_layers, **fields):
    """A config, and the tensors of its checkpoint as GLM-4.5 is published."""
    hf = tiny(
        "glm4_moe",
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_shared_experts=1,
        num_nextn_predict_layers=num_mtp_layers,
        use_qk_norm=True,
        **fields,
    )
    return hf, state_with_mtp(hf, num_mtp_layers)


def state_with_mtp(hf, num_mtp_layers):
    """The tensors of a checkpoint whose MTP layers are behind the decoder's, with copies of embedding and head."""
    state = random_state(hf)
    for number in range(LAYERS, LAYERS + num_mtp_layers):
        prefix = f"model.layers.{number}."
        generator = torch.Generator().manual_seed(number)
        like = {name: tensor for name, tensor in state.items() if name.startswith(f"model.layers.{LAYERS - 1}.")}
        for name, tensor in like.items():
            state[name.replace(f"model.layers.{LAYERS - 1}.", prefix)] = torch.randn(tensor.shape, generator=generator)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            state[f"{prefix}{name}.weight"] = 1 + 0.1 * torch.randn(48, generator=generator)
        state[f"{prefix}eh_proj.weight"] = torch.randn(48, 96, generator=generator) * 0.1
        state[f"{prefix}embed_tokens.weight"] = state["model.embed_tokens.weight"]
        state[f"{prefix}shared_head.head.weight"] = state["lm_head.weight"]
    return state


def goes_round(hf, state, dims, num_mtp_layers):
    overrides = {"mtp_num_layers": num_mtp_layers}
    held = fake_mesh.build_everywhere(
        hf, dims, lambda chunks: load_hf_weights(chunks, state), dtype=torch.float32, overrides=overrides
    )
    exported = fake_mesh.export(held)
    assert exported.keys() == state.keys()
    assert all(torch.equal(exported[name], state[name]) for name in state)


@pytest.mark.parametrize("num_mtp_layers", [1, 2])
@pytest.mark.parametrize("dims", MESHES, ids=str)
def test_they_go_round(dims, num_mtp_layers):
    goes_round(*published(num_mtp_layers), dims, num_mtp_layers)


@pytest.mark.parametrize("layout", ["Ettt|tmL", "Etttt|mL", "Ett|tt|m|L", "Ettt|t|m|L"])
def test_they_go_round_in_a_stage_of_their_own(layout):
    goes_round(*published(1), ParallelDims(pp=layout.count("|") + 1, layout=layout), 1)


@pytest.mark.parametrize("dims", MESHES, ids=str)
def test_in_the_file_and_not_built_they_are_ignored_and_reported(dims):
    hf, state = published(1)
    reports = []
    held = fake_mesh.build_everywhere(
        hf, dims, lambda chunks: reports.append(load_hf_weights(chunks, state)), dtype=torch.float32
    )
    extra = {name for name in state if name.startswith(f"model.layers.{LAYERS}.")}
    assert all(set(report.ignored) == extra for report in reports)
    assert fake_mesh.export(held).keys() == state.keys() - extra


def test_layers_beyond_those_that_the_config_has_are_unexpected():
    hf, state = published(1)
    more = {**state, f"model.layers.{LAYERS + 1}.enorm.weight": torch.ones(48)}
    with pytest.raises(CheckpointError, match=r"unexpected.*layers.5.enorm"):
        fake_mesh.build_everywhere(hf, ParallelDims(), lambda c: load_hf_weights(c, more), dtype=torch.float32)


def test_a_part_of_a_layer_is_missing():
    hf, state = published(1)
    state.pop(f"model.layers.{LAYERS}.eh_proj.weight")
    with pytest.raises(CheckpointError, match=r"missing.*layers.4.eh_proj"):
        goes_round(hf, state, ParallelDims(), 1)


def drawn(hf, state, sizes):
    """Runs in each worker: what is drawn where the file has no MTP layer, and what the load says of it."""
    dims = ParallelDims(**sizes)
    with stepping.mesh(dims):
        models = mb.build_model(
            hf, dims=dims, dtype=torch.float32, device="cpu", load_weights=state, overrides={"mtp_num_layers": 1}
        )
        report = load_hf_weights(models, state)
        return report.initialised, mb.to_hf_state_dict(models)


@pytest.mark.parametrize("sizes", [{"tp": 2, "sp": True}, {"pp": 2}, {"ep": 2}], ids=str)
def test_built_and_not_in_the_file_they_are_drawn_and_reported(sizes):
    hf, state = published(1)
    plain = {name: tensor for name, tensor in state.items() if not name.startswith(f"model.layers.{LAYERS}.")}
    results = pool.run(2, drawn, hf, plain, sizes)
    named = {name for initialised, _ in results for name in initialised}
    copies = {f"model.layers.{LAYERS}.embed_tokens.weight", f"model.layers.{LAYERS}.shared_head.head.weight"}
    assert named == state.keys() - plain.keys() - copies
    for _, exported in results:
        assert exported.keys() == state.keys()
        for name in named:
            assert torch.equal(exported[name], results[0][1][name])
            if "norm" not in name and "bias" not in name:
                assert 0.01 < exported[name].std() < 0.03, name
