"""Checks of every family of the zoo besides parity: exact round trips on drawn meshes, and a complete config table."""

import contextlib
import copy
import itertools
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from mcore_bridge import ParallelDims, build_model, to_transformer_config
from mcore_bridge.architecture import architecture_of
from mcore_bridge.config.fields import require_total
from mcore_bridge.config.hf import read_config
from mcore_bridge.config.mesh.divisibility import check_model
from mcore_bridge.errors import BridgeError, MeshError
from mcore_bridge.factory.chunk import mark_cut
from tests import zoo
from tests.support import fake_mesh
from tests.support.families import built, ignored_by
from tests.support.round_trips import check

EXAMPLES = 4
AXES = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4), (2, 4)]
EXPERT_AXES = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]


def sizes_that_fit(hf: Any) -> list[dict[str, Any]]:
    """Sizes of all axes that megatron-core can cut the model along."""
    config = to_transformer_config(hf)
    has_experts, found = config.num_moe_experts is not None, []
    for (tp, pp), (ep, etp) in itertools.product(AXES, EXPERT_AXES if has_experts else EXPERT_AXES[:1]):
        for vp in (1, 2) if pp == 2 else (1,):
            sizes = {"tp": tp, "pp": pp, "vp": vp, "ep": ep, "etp": etp, "sp": tp > 1}
            dims = ParallelDims(**sizes)
            with contextlib.suppress(MeshError):
                check_model(dims, {**vars(config), **dims.to_config_fields()})
                found.append(sizes)
    return found


def fits(hf: Any, sizes: dict[str, Any]) -> bool:
    try:
        to_transformer_config(hf, dims=ParallelDims(**sizes))
    except MeshError:
        return False
    return True


@st.composite
def meshes(draw: Any, hf: Any, fitting: list[dict[str, Any]]) -> ParallelDims:
    """Any of these sizes, with an even, an uneven or a balanced pipeline."""
    sizes = dict(draw(st.sampled_from(fitting)))
    splits: list[dict[str, Any]] = [{}]
    if sizes["pp"] > 1 and sizes["vp"] == 1:
        uneven = "E" + "t" * (hf.num_hidden_layers - 1) + "|" * (sizes["pp"] - 1) + "tL"
        splits += [split for split in ({"layout": "balanced"}, {"layout": uneven}) if fits(hf, {**sizes, **split})]
    return ParallelDims(**sizes, **draw(st.sampled_from(splits)))


@pytest.mark.parametrize("name", zoo.params(zoo.written()))
def test_every_family_goes_round_on_any_mesh(name: str) -> None:
    hf = zoo.cases()[name].hf
    fitting = sizes_that_fit(hf)
    assert len(fitting) >= 3  # some have no pipelines

    @settings(max_examples=EXAMPLES if name in CONFIG_MAPPING else EXAMPLES // 2)  # a variant of a family has fewer
    @given(meshes(hf, fitting), st.sampled_from([1, 1 << 12, 1 << 20]))
    def goes_round(dims: ParallelDims, bucket_bytes: int) -> None:
        check(hf, dims, bucket_bytes=bucket_bytes)

    goes_round()


MADE = (
    {
        "step3p5": {"hidden_act", "rope_parameters"},
        "hy_v4": {"num_key_value_heads"},
        "deepseek_v4": {"rope_parameters"},
        "minimax_m3_vl_text": {"hidden_act"},
    }
    if zoo.NEWEST
    else {"gpt_neox": {"rope_theta", "partial_rotary_factor"}, "llama4_text": {"attention_bias"}}
)
"""Fields that a config class computes from other fields at every reading, ignoring their values."""
MODEL_TYPES = sorted({case.model_type for case in zoo.cases().values()})


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_field_of_the_default_config_is_accounted_for(model_type: str) -> None:
    hf = read_config(CONFIG_MAPPING[model_type]())
    require_total(architecture_of(hf).fields, hf.to_dict())


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_changing_any_field_changes_the_model_or_raises_or_is_ignored_by_name(model_type: str) -> None:
    """It changes the model in at least one case: a window, for example, matters only if a layer slides."""
    outcomes: dict[str, set[str]] = {}
    for case in zoo.cases().values():
        if case.model_type == model_type:
            hf = read_config(case.hf)
            base, fields = built(hf), case.hf.to_dict()
            for field in fields.keys() - {"model_type"}:
                outcomes.setdefault(field, set()).add(_outcome(type(hf), fields, field, base))
    ignored = ignored_by(architecture_of(model_type).fields)
    assert {field for field, found in outcomes.items() if found == {"nothing"}} - MADE.get(model_type, set()) <= ignored
    assert {field for field in ignored & outcomes.keys() if "changes" in outcomes[field]} == set()


def _outcome(kind: Any, fields: dict[str, Any], field: str, base: dict[str, object]) -> str:
    """The effect of another value of the field: "changes" (of the model), "raises" (any error) or "nothing"."""
    fields = {**copy.deepcopy(fields), field: _another(field, fields[field])}
    if field == "num_hidden_layers":
        fields |= {
            name: value[: fields[field]] for name, value in fields.items() if name.endswith("layer_types") and value
        }
    try:
        changed = kind.from_dict(fields)
    except Exception:  # transformers refuses it
        return "raises"
    try:
        return "nothing" if built(read_config(changed)) == base else "changes"
    except BridgeError:
        return "raises"


def _another(field: str, value: object) -> object:
    """Another value, of a type that transformers accepts for this field."""
    special: dict[str, object] = {"hidden_act": "relu", "hidden_activation": "relu", "num_hidden_layers": 3}
    match special.get(field, value):
        case None:
            return 3
        case bool() as flag:
            return not flag
        case int() | float() as number:
            return number if field in special else number * 2 or type(number)(1)
        case str() as text:
            return text if field in special else f"other_{text}"
        case list() as items if all(isinstance(item, int) for item in items):
            return [item + 1 for item in items] or [0]
        case list() as items:
            return items[::-1] if items != items[::-1] else [*items, *items]
        case dict() as mapping:
            return {**mapping, "rope_theta": 7.5}
        case other:
            raise AssertionError(f"no other value for {field}={other!r}")


def whole_model(hf: Any, dims: ParallelDims) -> Any:
    with fake_mesh.rank_of(dims, 0, dims.tp):
        (model,) = build_model(hf, dims=dims, load_weights=False, device="meta", dtype=torch.float32)
        return model


def parameters(hf: Any, dims: ParallelDims) -> dict[str, torch.nn.Parameter]:
    return dict(whole_model(hf, dims).named_parameters())


@pytest.mark.parametrize("name", {case.model_type: name for name, case in zoo.cases().items()}.values())
def test_what_tensor_parallel_ranks_hold_a_part_of_counts_for_the_norm_of_gradients(name: str) -> None:
    whole, parts = (parameters(zoo.cases()[name].hf, ParallelDims(tp=tp, sp=tp > 1)) for tp in (1, 2))
    for parameter, part in parts.items():
        is_part = part.shape != whole[parameter].shape or ".experts." in parameter
        assert getattr(part, "tensor_model_parallel", False) == is_part, parameter


def test_shared_experts_that_are_overlapped_count_for_the_norm_of_gradients() -> None:
    """megatron-core reads the mode of parallelism of a layer from them, and communicates accordingly."""
    model = whole_model(zoo.cases()["deepseek_v3"].hf, ParallelDims(tp=2, sp=True))
    linears = [module for name, module in model.named_modules() if re.search(r"\.shared_experts\.linear_fc[12]$", name)]
    for linear in linears:
        linear.parallel_mode = None
    mark_cut(model)
    assert linears
    assert all(linear.weight.tensor_model_parallel for linear in linears)
