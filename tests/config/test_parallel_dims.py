"""Sizes of the mesh: derived values, and sizes that are refused before a model is built."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from mcore_bridge.config.mesh.divisibility import check_model
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.errors import MeshError
from tests.support.megatron_stages import EMBEDDING, FIRST, LAST, LOSS


def test_data_parallel_sizes_follow_from_the_world() -> None:
    dims = ParallelDims(tp=2, cp=2, pp=2, ep=4, etp=1)
    assert (dims.model_size, dims.dp(16), dims.edp(16)) == (8, 2, 2)
    with pytest.raises(
        MeshError, match=r"12 ranks are not a multiple of tp=2 \* cp=2 \* pp=2 = 8: .* a multiple of 8 ranks\ntorchrun"
    ):
        dims.dp(12)
    with pytest.raises(MeshError, match=r"12 ranks are not a multiple of etp=1 \* ep=4 \* pp=2 = 8"):
        dims.edp(12)
    with pytest.raises(MeshError, match=r"0 ranks are not a multiple"):
        ParallelDims().dp(0)


def test_dims_read_well() -> None:
    dims = ParallelDims(tp=2, pp=2, vp=2, sp=True)
    assert str(dims) == "TP2 PP2 VP2 SP"
    assert str(ParallelDims()) == "TP1"
    assert dims.describe(world_size=4, num_layers=8) == "TP2 PP2 VP2 SP, DP1, 4 ranks; layers per stage: E2|(2)*2|2L"
    experts = ParallelDims(ep=2, layout="Ettt|L", pp=2)
    assert experts.describe(world_size=4, num_layers=3) == "PP2 EP2, DP2 EDP1, 4 ranks; layers per stage: E3|0L"


LEVELS = "hierarchical_context_parallel_sizes"


def test_flags_may_be_the_numbers_of_a_command_line() -> None:
    assert ParallelDims(tp=2, sp=1) == ParallelDims(tp=2, sp=True)  # type: ignore[arg-type]
    assert ParallelDims(tp=2, sp=0).sp is False  # type: ignore[arg-type]


def test_levels_of_context_parallelism_come_as_a_trainer_has_them() -> None:
    dims = ParallelDims(cp=8, tp=2, sp=True, hierarchical_context_parallel_sizes=(2, 4))
    assert str(dims) == "TP2 CP8 HCP2x4 SP"
    assert dims.to_group_sizes()[LEVELS] == dims.to_config_fields()[LEVELS] == [2, 4]
    assert ParallelDims(tp=2, sp=True).with_config_fields({"context_parallel_size": 8, LEVELS: [2, 4]}) == dims
    assert ParallelDims().to_group_sizes()[LEVELS] is None


def test_a_layout_may_be_what_megatron_core_takes_or_makes_of_it() -> None:
    """A layout may be megatron-core's string, the kinds of layers of each stage, or megatron-core's object."""
    names = [["Embedding", LayerType.decoder], [], ("decoder", "mtp "), ["loss"]]
    text = ParallelDims(pp=2, vp=2, layout="Et||tm|L")
    lists: list[Any] = [[*stage] for stage in names]
    layouts: list[Any] = [names, PipelineParallelLayerLayout(lists, 2), PipelineParallelLayerLayout("Et||tm|L", 2)]
    for layout in layouts:
        assert ParallelDims(pp=2, vp=2, layout=layout) == text
        assert ParallelDims(pp=2, vp=2).with_config_fields({"pipeline_model_parallel_layout": layout}) == text


def test_settings_of_none_mean_what_megatron_core_means_by_them() -> None:
    settings = dict.fromkeys(ParallelDims().to_config_fields())
    dims = ParallelDims(tp=2, sp=True, cp=4, hierarchical_context_parallel_sizes=(2, 2), etp=2, ep=2)
    assert dims.with_config_fields(settings) == ParallelDims()


NAMES = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4, "sequence_parallel": True}


def test_settings_of_trainers_are_read() -> None:
    """verl and NeMo-RL have sections; a missing size of experts is ``tp``; without ``tp`` there is no ``sp``."""
    split = {"pipeline_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "use_mbridge": True}
    verl = {**NAMES, **split, "override_transformer_config": {"pipeline_model_parallel_layout": "Et|tL", "lr": 1}}
    expected = ParallelDims(tp=2, ep=4, pp=2, sp=True, layout="Et|tL")
    assert ParallelDims.from_dict({"trainer": {}, "actor_rollout_ref": {"actor": {"megatron": verl}}}) == expected
    assert ParallelDims.from_dict({"policy": {"megatron_cfg": NAMES}}) == ParallelDims(tp=2, ep=4, etp=2, sp=True)
    assert ParallelDims.from_dict({"sequence_parallel": True, "context_parallel_size": None}) == ParallelDims()
    assert ParallelDims.from_dict({"tp": 2, "layout": None, "lr": 1}) == ParallelDims(tp=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 1}, r"by names such as tensor_model_parallel_size or tp, found none among \['lr'\]"),
        ({"tensor_model_paralel_size": 2, "pp": 2}, r"do you mean tensor_model_parallel_size\?"),
        ({"tp": 2, "tensor_model_parallel_size": 2}, "found tensor_model_parallel_size and tp"),
        ([2], r"must be a mapping of names to values, found \[2\]"),
        ({"tensor_model_parallel_size": "2"}, "tp must be an integer"),
        ({"tp": 1, "sp": True}, "sp=True needs tp > 1"),
    ],
)
def test_settings_that_are_no_mesh_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        ParallelDims.from_dict(settings)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp": 0}, r"tp must be an integer of at least 1, found 0"),
        ({"pp": 1.0}, r"pp must be an integer of at least 1, found 1.0"),
        ({"cp": True}, r"cp must be an integer of at least 1, found True"),
        ({"sp": True}, r"sp=True needs tp > 1.*found tp=1"),
        ({"tp": 2, "sp": 2}, r"sp must be True or False, found 2"),
        ({"pp": 2, EMBEDDING: "no"}, rf"{EMBEDDING} must be True or False, found 'no'"),
        ({"cp": 4, LEVELS: 4}, r"two sizes whose product is cp=4, found 4"),
        ({"pp": 2, "layout": b"Et|tL"}, r"layout must be text such as 'Ett\|ttL', or a list.*found b'Et\|tL'"),
        ({"pp": 2, "layout": [["embedding"], ["decoder", "head"]]}, r"layers of each stage \(embedding.*found \[\["),
        ({LEVELS: (2, 2)}, rf"{LEVELS} must be two sizes whose product is cp=1, found \(2, 2\)"),
        ({"cp": 8, LEVELS: (2, 2, 2)}, r"two sizes whose product is cp=8"),
        ({"cp": 4, LEVELS: [2.0, 2]}, r"two sizes whose product is cp=4"),
        ({"vp": 2}, r"vp=2 needs pp > 1.*found pp=1"),
        ({LAST: 3}, rf"{LAST}=3 needs pp > 1: megatron-core would build only these layers"),
        ({"pp": 2, FIRST: 0}, rf"{FIRST} must be an integer of at least 1, found 0"),
        ({"pp": 2, FIRST: 2, LOSS: True}, rf"{FIRST} and account_for.* must not both be given"),
        ({"pp": 2, "vp": 2, FIRST: 2, LAST: 2}, r"divides by zero.*Give one"),
        ({"pp": 2, "layout": "Et|tL", LAST: 1}, r"layout already says where every layer goes"),
        ({"pp": 2, "layout": "balanced", EMBEDDING: True}, r"layout already says where every layer goes"),
        ({"pp": 2, "vp": 2, "layout": "Et|tL"}, r"'Et\|tL' must have pp \* vp = 2 \* 2 = 4 stages, found 2"),
        ({"pp": 2, "layout": "Ex|tL"}, r"cannot be read by megatron-core: Invalid layer character: x"),
        (
            {"pp": 2, "layout": "Et*9999999999|L"},
            r"^layout .* at most 100000 layers and stages, found 10000000002: correct a number",
        ),
        ({"pp": 2, "layout": "E(t*9999|)*9999L"}, r"at most 100000 layers and stages, found 99990002"),
        ({"pp": 2, "layout": f"Et*{'9' * 9999}|L"}, r"cannot be read by megatron-core: Exceeds the limit"),
        ({"pp": 2, "layout": "|EtL"}, r"exactly one 'E', at the very start"),
        ({"pp": 2, "layout": "Et|Et"}, r"exactly one 'E', at the very start"),
        ({"pp": 2, "layout": "EtL|"}, r"exactly one 'L', at the very end"),
    ],
)
def test_impossible_dims_are_refused_before_any_model(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        ParallelDims(**fields)


@pytest.mark.parametrize(
    ("fields", "num_layers", "message"),
    [
        ({}, 0, r"num_layers must be at least 1, found 0"),
        ({"pp": 2}, 3, r"3 layers do not divide into pp \* vp = 2 \* 1 equal stages: use layout=\"balanced\""),
        ({"pp": 2, LOSS: True}, 4, r"5 layers \(embedding and loss counted.*do not divide"),
        ({"pp": 2, FIRST: 5}, 4, r"leave -1 layers for 1 other"),
        ({"pp": 3, FIRST: 2, LAST: 2}, 4, r"leave 0 layers for 1 other"),
        ({"pp": 3, FIRST: 1}, 4, r"leave 3 layers, which 2 other pipeline ranks cannot share equally"),
        ({"pp": 2, "vp": 2, FIRST: 1}, 5, r"the 1 layers of pipeline rank 0 do not divide into vp=2 chunks"),
        ({"pp": 2, "layout": "Et|tL"}, 3, r"must place the num_layers=3 layers of the model \('t'\), found 2"),
        ({"pp": 2, "layout": "balanced"}, 3, r"not resolved yet.*call mcore_bridge.config.mesh.balance.balanced"),
    ],
)
def test_a_split_that_does_not_fit_the_layers_is_refused(fields: dict[str, Any], num_layers: int, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        ParallelDims(**fields).stages(num_layers)


MODEL = {
    "num_layers": 4,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "kv_channels": 16,
    "ffn_hidden_size": 64,
    "vocab_size": 128,
}
EXPERTS = {"num_moe_experts": 8, "moe_ffn_hidden_size": 24, "moe_layer_freq": [0, 1, 1, 1]}


@pytest.mark.parametrize(
    ("fields", "changes", "message"),
    [
        ({"tp": 4}, {"num_attention_heads": 6, "num_query_groups": 6}, r"tp=4 must divide num_attention_heads=6"),
        ({"tp": 4}, {"ffn_hidden_size": 66}, r"tp=4 .* ffn_hidden_size=66 \(intermediate_size in the HF config\)"),
        ({"tp": 4}, {"vocab_size": 130}, r"tp=4 must divide vocab_size=130"),
        (
            {"tp": 4},
            {"num_attention_heads": 12, "num_query_groups": 3},
            r"num_query_groups=3 \(num_key_value_heads in the HF config\) or be a multiple",
        ),
        ({"tp": 8}, {"num_query_groups": 1, "kv_channels": 2}, r"tp=8 must divide the 20 rows of linear_qkv"),
        ({"ep": 2}, {}, r"ep=2 needs a model with experts"),
        ({"ep": 3}, EXPERTS, r"ep=3 must divide num_moe_experts=8"),
        ({"etp": 16}, EXPERTS, r"etp=16 .* moe_ffn_hidden_size=24 \(moe_intermediate_size in the HF config\)"),
        ({"tp": 2}, {**EXPERTS, "ffn_hidden_size": 65}, r"tp=2 must divide ffn_hidden_size=65"),
        ({"pp": 3}, {}, r"4 layers do not divide"),
        ({"pp": 2, "layout": "Ett|ttmL"}, {}, r"must place mtp_num_layers=0 .*found 1"),
        ({}, {"num_layers": None}, r"num_layers \(num_hidden_layers in the HF config\) must be an integer"),
    ],
)
def test_a_mesh_that_does_not_fit_the_model_is_refused(
    fields: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(MeshError, match=message):
        check_model(ParallelDims(**fields), {**MODEL, **changes})


def test_what_no_layer_uses_is_not_checked() -> None:
    every_layer_has_experts = {**MODEL, **EXPERTS, "moe_layer_freq": 1, "ffn_hidden_size": 65}
    check_model(ParallelDims(tp=2, ep=4, etp=2, pp=2), every_layer_has_experts)
    check_model(ParallelDims(pp=2, layout="Ett|ttmL"), {**MODEL, "mtp_num_layers": 1})
    check_model(ParallelDims(tp=8), MODEL)


@settings(max_examples=300)
@given(st.integers(1, 8), st.integers(1, 8), st.sampled_from([1, 2, 3, 4, 6, 8]), st.sampled_from([1, 2, 3, 12]))
def test_heads_fit_exactly_when_megatron_core_can_build_its_attention(
    groups: int, ratio: int, tp: int, size: int
) -> None:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.utils import divide

    heads = groups * ratio
    shape = {"num_attention_heads": heads, "num_query_groups": groups, "kv_channels": size}
    try:
        TransformerConfig(num_layers=4, hidden_size=heads * size, tensor_model_parallel_size=tp, **shape)
        divide((heads + 2 * groups) * size, tp)  # ColumnParallelLinear divides the rows of linear_qkv
        fits = True
    except (AssertionError, ValueError):
        fits = False
    try:
        check_model(ParallelDims(tp=tp), {**shape, "num_layers": 4})
    except MeshError:
        assert not fits
    else:
        assert fits
