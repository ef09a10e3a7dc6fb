"""Loss and every gradient of every mesh are transformers', and one optimizer step leaves transformers' weights."""

from functools import cache
from typing import Any

import pytest

from mcore_bridge import ParallelDims
from tests import pool, stepping, tiny

LR = 0.3
MESHES: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [
        {"tp": 2},
        {"tp": 2, "sp": True},
        {"pp": 2},
        {"pp": 2, "vp": 2},
        {"cp": 2},
        {},
        {"pp": 2, "num_layers_in_first_pipeline_stage": 1},
        {"pp": 2, "vp": 2, "layout": "E|ttt||tL"},
    ],
    4: [
        {"tp": 4, "sp": True},
        {"tp": 2, "sp": True, "pp": 2, "vp": 2},
        {"tp": 2, "cp": 2, "sp": True},
        {"cp": 2, "pp": 2},
        {"pp": 4, "layout": "Et|tt|t|L"},
        {"tp": 2, "pp": 2, "layout": "balanced"},
        {"tp": 2},
    ],
    8: [{"tp": 8, "sp": True}, {"tp": 2, "pp": 2, "cp": 2, "sp": True}, {"tp": 2, "sp": True, "pp": 2, "vp": 2}],
}
CASES = {
    "llama": tiny.config("llama", attention_bias=True, mlp_bias=True),
    "llama, o_proj bias, square": tiny.config("llama", **tiny.SQUARE),
    "mistral": tiny.config("mistral"),
    "qwen2, tied": tiny.config("qwen2"),
    "qwen3": tiny.config("qwen3"),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return {name: tiny.random_checkpoint(hf, tmp_path_factory.mktemp("tiny")) for name, hf in CASES.items()}


@cache
def expected(name: str) -> Any:
    """transformers' loss, gradients and weights after a step of SGD."""
    model = tiny.random_model(CASES[name])
    _, loss, grads = tiny.reference(model, tiny.tokens(16))
    return loss, grads, {n: p.detach() - LR * grads[n] for n, p in model.named_parameters()}


def steps(folders: dict[str, str], meshes: list[dict[str, Any]], every: int = 1) -> list[Any]:
    """Runs in each worker: a step on each mesh, of each checkpoint or of ``every`` so many in turn."""
    found = []
    for turn, sizes in enumerate(meshes):
        dims = ParallelDims(**sizes)
        with stepping.mesh(dims):
            for name, folder in list(folders.items())[turn % every :: every]:
                step = stepping.train(folder, dims, tiny.tokens(16), lr=LR, micro_batch_size=2)
                found.append((f"{name} on {sizes}", name, step))
    return found


def assert_equal_to_transformers(ranks: list[list[Any]]) -> None:
    for results in zip(*ranks, strict=True):
        for label, name, step in results:
            loss, grads, weights = expected(name)
            assert step["loss"] is None or tiny.relative_error(step["loss"], loss) < 1e-5, label
            assert step["grads"].keys() == grads.keys(), label
            for which, truth in (("grads", grads), ("weights", weights)):
                errors = {n: tiny.relative_error(step[which][n], truth[n]) for n in truth}
                worst = max(errors, key=errors.__getitem__)
                assert errors[worst] < 5e-5, f"{label}: {which} of {worst}: {errors[worst]}"
        assert any(step["loss"] is not None for _, _, step in results), results[0][0]


@pytest.mark.parametrize("world_size", MESHES)
def test_every_mesh_trains_as_transformers_does(checkpoints, world_size):
    folders = {name: str(folder) for name, folder in checkpoints.items()}
    assert_equal_to_transformers(pool.run(world_size, steps, folders, MESHES[world_size], max(1, world_size // 2)))
