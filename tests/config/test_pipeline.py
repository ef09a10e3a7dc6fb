"""Each stage has the layers that megatron-core's functions compute, for every drawn split, or the split is refused."""

from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.config.mesh.pipeline import Stage
from mcore_bridge.errors import MeshError
from tests.support.megatron_stages import EMBEDDING, FIRST, LAST, LOSS, megatron_stage, megatron_stages


@st.composite
def _splits(draw: Any) -> tuple[dict[str, Any], int]:
    """Any split of any pipeline, sensible or not, with a number of layers near one that fits."""
    pp = draw(st.integers(1, 5))
    vp = draw(st.integers(1, 3)) if pp > 1 else 1
    split: dict[str, Any] = {"pp": pp, "vp": vp}
    num_layers = pp * vp * draw(st.integers(1, 3)) + draw(st.sampled_from([-2, -1, 0, 0, 0, 1, 2]))
    kind = draw(st.sampled_from(["even", "sizes", "accounts", "layout"]))
    if kind == "accounts":
        split |= {EMBEDDING: draw(st.booleans()), LOSS: draw(st.booleans())}
    elif kind == "sizes" and pp > 1:
        names = draw(st.sampled_from([[FIRST], [LAST], [FIRST, LAST]]))
        split |= {name: vp * draw(st.integers(1, 3)) + draw(st.sampled_from([0, 0, 0, 1])) for name in names}
        num_middle = pp - len(names)
        num_layers = sum(split[name] for name in names) + num_middle * vp * draw(st.integers(-1, 3))
        num_layers += draw(st.sampled_from([0, 0, 0, 1]))
    elif kind == "layout":
        num_layers, split["layout"] = draw(_layouts(pp * vp))
    return split, max(num_layers, 1)


@st.composite
def _layouts(draw: Any, num_stages: int) -> tuple[int, str]:
    counts = draw(st.lists(st.integers(0, 3), min_size=num_stages, max_size=num_stages))
    stages = ["t" * count for count in counts]
    embedding = draw(st.sampled_from([0, 0, 0, 0, num_stages - 1]))
    loss = draw(st.sampled_from([-1, -1, -1, -1, 0]))
    stages[embedding] = "E" + stages[embedding]
    stages[loss] += "L"
    return sum(counts) + draw(st.sampled_from([0, 0, 0, 1])), "|".join(stages)


@settings(max_examples=600)
@given(_splits())
@example(({"pp": 4, "vp": 2, LAST: 2}, 14))  # Megatron-LM 1584: its ranks but the first got wrong offsets
@example(({"pp": 2, "vp": 2, FIRST: 4, LAST: 2}, 6))  # divides by zero
@example(({"pp": 3, "vp": 1, FIRST: 3, LAST: 3}, 4))  # a middle stage of -2 layers
@example(({"pp": 2, "vp": 1, "layout": "|EttL"}, 2))  # valid for megatron-core, and no rank would run the embedding
@example(({"pp": 2, "vp": 2, EMBEDDING: True, LOSS: True}, 2))  # embedding-only and loss-only stages
@example(({"pp": 2, "vp": 2, "layout": "E|t||tL"}, 2))
def test_stages_are_what_megatron_core_builds_or_are_refused(problem: tuple[dict[str, Any], int]) -> None:
    split, num_layers = problem
    try:
        found = ParallelDims(**split).stages(num_layers)
    except MeshError:
        found = None
    assert found == megatron_stages(split, num_layers)


@settings(max_examples=300)
@given(_splits())
def test_config_fields_are_accepted_and_mean_the_same(problem: tuple[dict[str, Any], int]) -> None:
    from megatron.core.transformer import TransformerConfig

    split, num_layers = problem
    try:
        dims = ParallelDims(**split)
        stages = dims.stages(num_layers)
    except MeshError:
        assume(False)
    fields: dict[str, Any] = dims.to_config_fields()
    config = TransformerConfig(
        num_layers=num_layers, hidden_size=8, num_attention_heads=2, pipeline_dtype=torch.float32, **fields
    )
    found = [megatron_stage(config, s.pp_rank, s.vp_stage, pp=dims.pp, vp=dims.vp) for s in stages]
    assert tuple(found) == stages


def test_stages_stand_in_execution_order() -> None:
    stages = ParallelDims(pp=2, vp=2, layout="E|t*2|(t)*3,|L").stages(5)
    assert stages == (
        Stage(0, 0, range(0), True, False),
        Stage(1, 0, range(2), False, False),
        Stage(0, 1, range(2, 5), False, False),
        Stage(1, 1, range(5, 5), False, True),
    )
    assert ParallelDims().stages(3) == (Stage(0, 0, range(3), True, True),)


def test_mtp_layers_of_a_layout_are_counted() -> None:
    stages = ParallelDims(pp=2, vp=2, layout="Et|t|t|tmL").stages(4)
    assert [stage.num_mtp_layers for stage in stages] == [0, 0, 0, 1]
    with pytest.raises(MeshError, match=r"(?s)megatron-core refuses the layout.*before MTP"):
        ParallelDims(pp=2, layout="Etm|tL").stages(2)
