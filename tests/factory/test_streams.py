"""Residual streams: loss and gradients on every mesh against transformers', recomputation, and what is refused."""

import pytest

from mcore_bridge import ParallelDims
from tests import zoo
from tests.support.training import Kind

CASES = {name: case.hf for name, case in zoo.cases().items() if case.model_type == "hy_v4"}
pytestmark = pytest.mark.skipif(not CASES, reason="the installed transformers lacks the family")
MESHES = {
    1: [{}],
    2: [{"tp": 2, "sp": True}, {"cp": 2}, {"pp": 2, "layout": "balanced"}, {"ep": 2}],
    4: [
        {"tp": 4, "sp": True},
        {"tp": 2, "cp": 2, "sp": True},
        {"tp": 2, "sp": True, "pp": 2, "vp": 2},
        {"tp": 2, "etp": 2, "ep": 2, "sp": True},
    ],
}


def fits(name, dims):
    """Whether each stage starts with an indexer."""
    return dims.vp == 1 or name == "hy_v4-indexers"


KIND = Kind(CASES, MESHES, every=2, fits=fits)


@pytest.mark.parametrize("world_size", MESHES)
def test_every_mesh_trains_as_transformers_does(world_size, tmp_path):
    KIND.check(world_size, tmp_path)
