"""Images: transformers' log-probs and gradients of the tower, on every mesh, in rows and packed."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from tests.support import composites, pool, seeing

pytestmark = pytest.mark.skipif("qwen3_5" not in composites.NAMES, reason="the installed transformers lacks it")
BOUND = 3e-5
SP, TP, CP, DP, EP, PP = {"tp": 2, "sp": True}, {"tp": 2}, {"cp": 2}, {}, {"ep": 2}, {"pp": 2}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ROWS: dict[str, Any] = {"packed": False}
CASES: dict[str, list[Any]] = {
    "qwen3_5": [(SP, {}), (TP, ROWS), (DP, {"overlap": True}), ({**PP, "vp": 2}, {})],
    "qwen3_5_moe": [(EP, {})],
    "qwen3_vl": [(SP, {"overrides": RECOMPUTED}), (CP, {})],
    "qwen3_vl_moe": [({**EP, "cp": 2}, ROWS)],
    "qwen2_5_vl": [(CP, {}), (CP, ROWS)],
    "qwen2_vl": [(SP, ROWS)],
    "glm4v": [(CP, {})],
    "glm46v": [(PP, {})],
    "glm4v_moe": [(EP, {})],
    "internvl": [(CP, {})],
    "mistral3": [(SP, {})],
    "gemma3": [(CP, {}), (SP, {**ROWS, "overrides": RECOMPUTED})],
    "llava": [(PP, {})],
    "llava_onevision": [(DP, {"overlap": True})],
}
"""Of each family, meshes of two ranks, with options of a step."""


@cache
def case(name: str) -> Any:
    folder = seeing.written(name, Path(mkdtemp()))
    model = seeing.reference(folder)
    batch = seeing.batch_of(model)
    wanted = seeing.expected(model, *batch)
    return folder, (*batch, wanted[0]), wanted


@pytest.mark.parametrize("name", CASES)
def test_the_tower_learns_as_in_transformers_on_two_ranks(name: str) -> None:
    """Replicas have equal bits, although no mean over them is taken here. A row of text has no part in a tower."""
    folder, batch, wanted = case(name)
    found = pool.run(2, seeing.steps, folder, CASES[name], batch)
    for (sizes, options), ranks in zip(CASES[name], zip(*found, strict=True), strict=True):
        assert seeing.problems(list(ranks), wanted, BOUND) == [], (sizes, options)
