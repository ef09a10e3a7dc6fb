"""Routers with a bias for softmax scores: on every mesh, in training, with other options of megatron-core's router."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from mcore_bridge.architecture import architecture_of
from mcore_bridge.config.tables.moe import MLP_TYPES
from mcore_bridge.config.transformer import to_gpt_arguments, to_hf_config, to_transformer_config
from mcore_bridge.errors import ConfigError
from mcore_bridge.models.ernie4_5_moe import INTERVAL
from tests import zoo
from tests.support import pool, stepping, tiny
from tests.support.bounds import BOUND, EXPERT_MESHES, ONE
from tests.support.families import built
from tests.support.parity import reference_of, tokens, worst_differences
from tests.support.strategies import random_state
from tests.support.training import Kind, read_folder

NAME = "ernie4_5_moe"
BIAS = "model.layers.1.mlp.moe_statics.e_score_correction_bias"
CASES = zoo.params(name for name in zoo.written() if name.startswith(NAME))

# -- logits and gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", EXPERT_MESHES, ids=str)
def test_logits_do_not_depend_on_where_experts_are(dims: ParallelDims) -> None:
    case = (zoo.cases()[NAME].hf, dims, reference_of(NAME))
    for (worst,) in pool.run(max(dims.tp, dims.ep * dims.etp), worst_differences, [case]):
        assert worst < BOUND


MESHES: dict[int, list[dict[str, Any]]] = {
    2: [{"tp": 2, "ep": 2, "sp": True}, {"tp": 2, "etp": 2, "sp": True}, {"pp": 2}, {"cp": 2}, {"ep": 2}],
    4: [{"tp": 2, "sp": True, "ep": 2, "etp": 2}, {"tp": 4, "etp": 4, "sp": True}],
}


PLAIN = zoo.case(NAME, **{**zoo.cases()[NAME].fields, "pad_token_id": None}).hf
"""A config without a token for padding, since transformers would not train its embedding."""
KIND = Kind({NAME: PLAIN}, MESHES)


@pytest.mark.parametrize("world_size", MESHES)
def test_every_mesh_trains_as_transformers_does(world_size: int, tmp_path: Path) -> None:
    KIND.check(world_size, tmp_path)


def balanced(folder: str) -> Any:
    """Run in each worker: the bias after a step of a trainer that balances experts with it."""
    dims = ParallelDims(ep=2)
    with stepping.mesh(dims):
        step = stepping.train(folder, dims, tiny.tokens(8), overrides={"moe_router_bias_update_rate": 0.25})
        return step["weights"][BIAS]


def test_the_bias_balances_experts_where_the_trainer_says_so(tmp_path: Path) -> None:
    folder = str(tiny.random_checkpoint(PLAIN, tmp_path))
    before = dict(read_folder(Path(folder)))[BIAS]
    for bias in pool.run(2, balanced, folder):
        moved = (bias - before).abs()
        torch.testing.assert_close(moved[moved > 0], torch.full_like(moved[moved > 0], 0.25))
        assert (moved > 0).any()


# -- with what mcore's router has besides ------------------------------------------------------------------------------


def replayed() -> list[Any]:
    """Runs in a worker: logits normally, while choices are recorded, without the bias, and without the bias but
    replayed.
    """
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    hf = zoo.cases()[NAME].hf
    batch, found = tokens(hf), []
    RouterReplay.clear_global_router_replay_instances()
    with stepping.mesh(ONE):
        (model,) = mb.build_model(
            hf,
            dims=ONE,
            dtype=torch.float32,
            device="cpu",
            load_weights=random_state(hf),
            overrides={"moe_enable_routing_replay": True},
        )
        model.eval()

        @torch.no_grad()
        def forward() -> None:
            found.append(model(batch, torch.arange(batch.shape[1]).expand_as(batch), None))

        forward()
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        forward()
        RouterReplay.clear_global_router_replay_action()
        for layer in model.decoder.layers[1:]:
            layer.mlp.router.expert_bias.zero_()
        forward()
        RouterReplay.set_replay_data(RouterReplay.get_recorded_data())
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        forward()
    RouterReplay.clear_global_router_replay_instances()
    return found


def test_experts_are_replayed() -> None:
    ((plain, recorded, without_bias, replayed_without_bias),) = pool.run(1, replayed)
    assert torch.equal(plain, recorded)
    assert torch.equal(plain, replayed_without_bias)
    assert (plain - without_bias).abs().max() > 0.01 * plain.std()


def refusal(overrides: dict[str, Any]) -> str:
    """Runs in a worker."""
    hf = zoo.cases()[NAME].hf
    with stepping.mesh(ONE):
        try:
            mb.build_model(hf, dims=ONE, device="cpu", load_weights=False, overrides=overrides)
        except ConfigError as error:
            return str(error)
    return ""


def test_the_fused_kernel_is_refused() -> None:
    (message,) = pool.run(1, refusal, {"moe_router_fusion": True})
    assert "moe_router_fusion must be False" in message


def test_either_backend_gets_a_router_where_scores_need_one() -> None:
    from mcore_bridge.factory.modules.backend import LayerContext
    from mcore_bridge.factory.modules.experts import BiasedRouter, Router, adapt_experts

    for name, backend, router in (
        (NAME, "te", BiasedRouter),
        (NAME, "torch", Router),
        ("qwen3_moe", "te", None),
        ("qwen3_moe", "torch", Router),
    ):
        config = mb.to_transformer_config(zoo.cases()[name].hf)
        experts = SimpleNamespace(submodules=SimpleNamespace(linear_fc2=None))
        layer = SimpleNamespace(mlp=SimpleNamespace(submodules=SimpleNamespace(router=None, experts=experts)))
        adapt_experts(layer, LayerContext(config, 0, backend))
        assert layer.mlp.submodules.router is router


def test_other_families_have_no_bias_for_softmax_scores() -> None:
    with pytest.raises(ConfigError, match="moe_router_enable_expert_bias=True, expected False"):
        mb.to_transformer_config(zoo.cases()["qwen3_moe"].hf, overrides={"moe_router_enable_expert_bias": True})


# -- bits --------------------------------------------------------------------------------------------------------------


def cast(state: dict[str, torch.Tensor]) -> Any:
    """Runs in each worker: a bf16 model of an fp32 checkpoint."""
    hf, dims = zoo.cases()[NAME].hf, ParallelDims(ep=2)
    with stepping.mesh(dims):
        models = mb.build_model(hf, dims=dims, device="cpu", load_weights=state)
        return mb.to_hf_state_dict(models)


def test_the_bias_keeps_its_row_and_its_bits() -> None:
    state = random_state(zoo.cases()[NAME].hf)
    for exported in pool.run(2, cast, state):
        assert exported[BIAS].shape == (1, 8)
        for name, tensor in exported.items():
            kept = name.endswith("e_score_correction_bias")
            assert torch.equal(tensor, state[name] if kept else state[name].bfloat16()), name


# -- configs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_configs_come_back(name: str) -> None:
    hf = zoo.cases()[name].hf
    table = architecture_of(hf).fields
    back = to_hf_config(to_transformer_config(hf, table), to_gpt_arguments(hf, table), table)
    assert built(type(hf).from_dict(hf.to_dict() | back)) == built(hf)
    said = {field for field in back if "rope" not in field and not field.startswith("moe_layer")}
    assert {field: back[field] for field in said} == {field: getattr(hf, field) for field in said}


@pytest.mark.parametrize(
    ("start", "end", "interval", "layers"),
    [
        (0, 5, 1, [1, 1, 1, 1, 1, 1]),
        (1, -1, 1, [0, 1, 1, 1, 1, 1]),
        (2, 4, 1, [0, 0, 1, 1, 1, 0]),
        (0, 5, 2, [0, 1, 0, 1, 0, 1]),
        (3, 5, 3, [0, 0, 0, 0, 0, 1]),
        (6, 5, 1, [0, 0, 0, 0, 0, 0]),
    ],
)
def test_layers_with_experts(start: int, end: int, interval: int, layers: list[int]) -> None:
    names = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")
    found = INTERVAL.to_mcore({**dict(zip(names, (start, end, interval), strict=True)), "num_hidden_layers": 6})
    assert found == {"moe_layer_freq": layers}
    back = INTERVAL.to_hf({**found, "num_layers": 6})
    assert INTERVAL.to_mcore({**back, "num_hidden_layers": 6}) == found


def test_layers_with_experts_come_back_however_mcore_says_them() -> None:
    for freq in (2, [1, 0, 1, 0]):
        kinds = MLP_TYPES.to_hf({"moe_layer_freq": freq, "num_layers": 4})
        assert kinds == {"mlp_layer_types": ["sparse", "dense", "sparse", "dense"]}


def test_layers_that_hf_cannot_say_are_refused() -> None:
    with pytest.raises(ConfigError, match="at multiples of one distance only"):
        INTERVAL.to_hf({"moe_layer_freq": [1, 1, 0, 1], "num_layers": 4})


@pytest.mark.parametrize(
    ("field", "value"), [("use_bias", True), ("moe_use_aux_free", False), ("moe_gate", "top2_fused")]
)
def test_what_is_not_reproduced_is_refused(field: str, value: object) -> None:
    hf = AutoConfig.for_model(NAME, **{**zoo.cases()[NAME].fields, field: value})
    with pytest.raises(ConfigError, match=f"{field} must be"):
        mb.to_transformer_config(hf)
