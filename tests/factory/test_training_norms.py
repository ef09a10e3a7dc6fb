"""As ``test_training``, for families with other places of norms, capped scores, and a different rope in each layer."""

from functools import cache
from typing import Any

import pytest

from tests.support import pool, tiny, training
from tests.support.norm_cases import CASES
from tests.support.training import LR, steps

MESHES: dict[int, list[dict[str, Any]]] = {  # the first family and every third of them on the first mesh, and so on
    2: [{"tp": 2, "sp": True}, {"tp": 2, "sp": True}, {"pp": 2, "vp": 2}, {"cp": 2}],
    4: [{"tp": 4, "sp": True}, {"tp": 4}, {"tp": 2, "cp": 2, "sp": True}, {"tp": 2, "sp": True, "pp": 2, "vp": 2}],
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return {name: tiny.random_checkpoint(hf, tmp_path_factory.mktemp("norms")) for name, hf in CASES.items()}


@cache
def expected(name: str) -> Any:
    model = tiny.random_model(CASES[name])
    _, loss, grads = tiny.reference(model, tiny.tokens(16))
    return loss, grads, {n: p.detach() - LR * grads[n] for n, p in model.named_parameters()}


@pytest.mark.parametrize("world_size", MESHES)
def test_every_mesh_trains_as_transformers_does(checkpoints, world_size, monkeypatch):
    monkeypatch.setattr(training, "expected", expected)
    folders = {name: str(folder) for name, folder in checkpoints.items()}
    training.assert_equal_to_transformers(pool.run(world_size, steps, folders, MESHES[world_size], 3))
