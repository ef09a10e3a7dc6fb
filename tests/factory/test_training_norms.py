"""Like ``test_training.py``, for families with norms in other places, capped scores, and a different rope in each
layer.
"""

from typing import Any

import pytest

from tests.support.norm_cases import CASES
from tests.support.training import Kind

MESHES: dict[int, list[dict[str, Any]]] = {  # the first family and every third of them on the first mesh, and so on
    2: [{"tp": 2, "sp": True}, {"tp": 2, "sp": True}, {"pp": 2, "vp": 2}, {"cp": 2}],
    4: [{"tp": 4, "sp": True}, {"tp": 4}, {"tp": 2, "cp": 2, "sp": True}, {"tp": 2, "sp": True, "pp": 2, "vp": 2}],
}
KIND = Kind(CASES, MESHES, every=3)


@pytest.mark.parametrize("world_size", MESHES)
def test_every_mesh_trains_as_transformers_does(world_size, tmp_path):
    KIND.check(world_size, tmp_path)
