"""What every family of the zoo is held to besides parity: exact round trips on drawn meshes, a total config table."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from mcore_bridge import ParallelDims, to_transformer_config
from mcore_bridge.architecture import architecture_of
from mcore_bridge.config.fields import require_total
from mcore_bridge.config.hf import read_config
from mcore_bridge.errors import BridgeError, MeshError
from tests import zoo
from tests.families import built, ignored_by
from tests.test_roundtrip import check

EXAMPLES = 5
EXPERT_AXES = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]


@st.composite
def meshes(draw: Any, hf: Any) -> ParallelDims:
    """Any mesh that may fit the model: every axis, uneven and balanced pipelines."""
    tp, pp = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4), (2, 4)]))
    vp = draw(st.sampled_from([1, 2])) if pp == 2 else 1
    ep, etp = draw(st.sampled_from(EXPERT_AXES)) if to_transformer_config(hf).num_moe_experts else (1, 1)
    splits: list[dict[str, Any]] = [{}]
    if pp > 1 and vp == 1:
        splits += [{"layout": "balanced"}, {"layout": "E" + "t" * (hf.num_hidden_layers - 1) + "|" * (pp - 1) + "tL"}]
    sp = tp > 1 and (ep * etp > 1 or draw(st.booleans()))
    return ParallelDims(tp=tp, pp=pp, vp=vp, ep=ep, etp=etp, sp=sp, **draw(st.sampled_from(splits)))


@pytest.mark.parametrize("name", zoo.cases())
def test_every_family_goes_round_on_any_mesh(name: str) -> None:
    hf = zoo.cases()[name].hf
    tried = []

    @settings(max_examples=EXAMPLES)
    @given(meshes(hf), st.sampled_from([1, 1 << 12, 1 << 20]))
    def goes_round(dims: ParallelDims, bucket_bytes: int) -> None:
        try:
            to_transformer_config(hf, dims=dims)
        except MeshError:
            return
        tried.append(dims)
        check(hf, dims, bucket_bytes=bucket_bytes)

    goes_round()
    assert len(set(map(str, tried))) >= 2


MODEL_TYPES = sorted({case.model_type for case in zoo.cases().values()})


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_field_of_the_default_config_is_accounted_for(model_type: str) -> None:
    hf = read_config(CONFIG_MAPPING[model_type]())
    require_total(architecture_of(hf).fields, hf.to_dict())


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_changing_any_field_changes_the_model_or_raises_or_is_ignored_by_name(model_type: str) -> None:
    """In one case at least: a window, say, matters only where a layer slides."""
    outcomes: dict[str, set[str]] = {}
    for case in zoo.cases().values():
        if case.model_type == model_type:
            base = built(read_config(case.hf))
            for field in case.hf.to_dict().keys() - {"model_type"}:
                outcomes.setdefault(field, set()).add(_outcome(case.hf, field, base))
    ignored = ignored_by(architecture_of(model_type).fields)
    assert {field for field, found in outcomes.items() if found == {"nothing"}} <= ignored
    assert {field for field in ignored & outcomes.keys() if "changes" in outcomes[field]} == set()


def _outcome(hf: Any, field: str, base: dict[str, object]) -> str:
    """What changing the field does: "changes" what is built, "raises" an error of ours or of theirs, or "nothing"."""
    fields = hf.to_dict()
    fields[field] = _another(field, fields[field])
    if field == "num_hidden_layers":
        fields |= {
            name: value[: fields[field]] for name, value in fields.items() if name.endswith("layer_types") and value
        }
    try:
        changed = type(hf).from_dict(fields)
    except Exception:  # transformers refuses it
        return "raises"
    try:
        return "nothing" if built(read_config(changed)) == base else "changes"
    except BridgeError:
        return "raises"


def _another(field: str, value: object) -> object:
    """Another value, of a type that transformers takes for this field."""
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
            return {**mapping, "other": 1}
        case other:
            raise AssertionError(f"no other value for {field}={other!r}")
