"""Ling 2.0, which transformers lacks: its logits, round trips and parameter counts against an equivalent family."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from mcore_bridge.architecture import architecture_of, read_hf
from mcore_bridge.config.transformer import to_gpt_arguments, to_hf_config, to_transformer_config
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.param_count import count_params
from mcore_bridge.weights.load import load_hf_weights
from tests.support import bailing, fake_mesh, pool, stepping
from tests.support.bailing import PUBLISHED, TINY
from tests.support.bailing_logits import logits, reference
from tests.support.bounds import BOUND, EXPERT_MESHES, FOUR, ONE, TWO

# -- logits ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        name: str(bailing.write(tmp_path_factory.mktemp("ling"), fields, bailing.twin_state(fields)))
        for name, fields in TINY.items()
    }


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return {name: reference(fields, tmp_path_factory.mktemp("twin")) for name, fields in TINY.items()}


@pytest.mark.parametrize("dims", [ONE, TWO, FOUR, *EXPERT_MESHES], ids=str)
@pytest.mark.parametrize("name", TINY)
def test_logits_are_those_of_the_twin(
    folders: dict[str, str], references: dict[str, Tensor], name: str, dims: ParallelDims
) -> None:
    expected = references[name]
    for ours in pool.run(max(dims.tp, dims.ep * dims.etp), logits, folders[name], dims):
        assert float((ours - expected).abs().max() / expected.std()) < BOUND


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [ONE, FOUR, EXPERT_MESHES[-1], ParallelDims(pp=2, layout="balanced")], ids=str)
@pytest.mark.parametrize("name", TINY)
def test_weights_go_round(folders: dict[str, str], name: str, dims: ParallelDims) -> None:
    state = bailing.renamed(bailing.twin_state(TINY[name]))
    held = fake_mesh.build_everywhere(
        read_hf(folders[name]), dims, lambda chunks: load_hf_weights(chunks, state), dtype=torch.float32
    )
    exported = fake_mesh.export(held)
    assert exported.keys() == state.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("name", TINY)
def test_it_is_counted_as_its_twin(folders: dict[str, str], name: str) -> None:
    assert count_params(read_hf(folders[name])) == count_params(bailing.twin(TINY[name]))


# -- configs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["bailing_moe", "bailing_moe_v2"])
def test_the_published_config_is_read_and_written_back(tmp_path: Path, model_type: str) -> None:
    hf = read(tmp_path, model_type=model_type)
    table = architecture_of(hf).fields
    config, arguments = (
        to_transformer_config(hf, table, dims=ParallelDims(tp=4, ep=8, sp=True)),
        to_gpt_arguments(hf, table),
    )
    assert (config.num_moe_experts, config.moe_router_group_topk, config.moe_layer_freq) == (256, 4, [0] + [1] * 19)
    assert (arguments["rotary_base"], arguments["rotary_percent"]) == (600000, 0.5)
    back = to_hf_config(config, arguments, table)
    assert {name: PUBLISHED[name] for name in back.keys() & PUBLISHED.keys()} == {
        name: value for name, value in back.items() if name in PUBLISHED
    } | {name: PUBLISHED[name] for name in ("rope_theta", "rope_scaling", "partial_rotary_factor") if name in back}
    assert {"num_experts", "num_shared_experts", "n_group", "topk_group", "use_qk_norm", "use_qkv_bias"} <= back.keys()


def read(folder: Path, **changes: Any) -> Any:
    fields = {name: value for name, value in {**PUBLISHED, **changes}.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(fields))
    return read_hf(folder)


REFUSED: dict[str, dict[str, Any]] = {
    "n_group must be a positive whole number, found None": {"n_group": "absent", "topk_group": "absent"},  # Ling 1
    "use_qk_norm must be set": {"use_qk_norm": "absent"},
    "num_experts must be set": {"num_experts": "absent"},
    "score_function must be 'sigmoid'": {"score_function": "softmax"},
    "moe_router_enable_expert_bias must be True": {"moe_router_enable_expert_bias": False},
    "norm_topk_prob must be True": {"norm_topk_prob": False},
    "num_nextn_predict_layers must be 0": {"num_nextn_predict_layers": 1},
    "use_bias must be False": {"use_bias": True},
    "rotary_dim must be 64": {"rotary_dim": 32},
    "norm_head must be False": {"norm_head": True},  # of Ling 1
    "must be twice topk_group=2": {"topk_group": 2},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_reproduced_is_refused(tmp_path: Path, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mb.to_transformer_config(read(tmp_path, **REFUSED[message]))


def test_a_rotary_dim_that_agrees_is_read(tmp_path: Path) -> None:
    assert mb.to_transformer_config(read(tmp_path, rotary_dim=64)).hf_rope.rotary_dim == 64


# -- the router, where the twin differs --------------------------------------------------------------------------------


def chosen(folder: str, hidden: Tensor, bias: Tensor) -> Tensor:
    """Runs in a worker: the weights of experts from the router of the last layer."""
    with stepping.mesh(ONE):
        (model,) = mb.build_model(folder, dims=ONE, dtype=torch.float32, device="cpu")
        router = model.eval().decoder.layers[-1].mlp.router
        with torch.no_grad():
            router.expert_bias.copy_(bias)
            weights, _ = router(hidden)
        return weights


def test_a_group_that_is_left_out_stays_out_where_all_biased_scores_are_negative(folders: dict[str, str]) -> None:
    """The experts that the published code chooses, from the two best groups. A group's score is the sum of its two
    best.
    """
    generator = torch.Generator().manual_seed(0)
    hidden, bias = torch.randn(50, 1, 48, generator=generator), -5 + torch.randn(8, generator=generator)
    weight = bailing.twin_state(TINY["grouped"])["model.layers.3.mlp.gate.weight"]
    scores = (hidden[:, 0] @ weight.T).sigmoid()
    best = (scores + bias).view(50, 4, 2).sum(-1).topk(2).indices
    in_best = torch.zeros(50, 4).scatter(1, best, 1.0).repeat_interleave(2, dim=1)
    expected = 2.5 * scores * in_best / (scores * in_best).sum(-1, keepdim=True)
    ((found),) = pool.run(1, chosen, folders["grouped"], hidden, bias)
    torch.testing.assert_close(found, expected)


def test_switches_of_the_published_code_that_are_off_change_nothing(tmp_path: Path) -> None:
    """As in Ling-1T."""
    off = dict.fromkeys(("norm_head", "norm_softmax", "using_split_qkv_in_self_attention"), False)
    for number, fields in enumerate((PUBLISHED, {**PUBLISHED, **off})):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "config.json").write_text(json.dumps(fields))
    plain, same = (mb.to_transformer_config(tmp_path / number, strict_config=True) for number in "01")
    assert vars(plain).keys() == vars(same).keys()
