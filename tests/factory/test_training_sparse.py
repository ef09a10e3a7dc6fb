"""Sparse attention trains as transformers does, on every axis; the indexer, which only selects, does not."""

import pytest

from mcore_bridge import ParallelDims
from tests import zoo
from tests.support import pool, stepping, tiny

CASES = zoo.here(("deepseek_v32", "glm_moe_dsa-shared"))
MESHES = {
    2: [{"tp": 2, "sp": True}, {"pp": 2}, {"cp": 2}, {"ep": 2}],
    4: [{"tp": 4, "sp": True}, {"tp": 2, "cp": 2, "ep": 2, "sp": True}],
}
pytestmark = pytest.mark.skipif(not CASES, reason="sparse attention needs newer transformers and megatron-core")


def steps(folders, meshes):
    """Runs in each worker: a step on each mesh."""
    return stepping.train_cases(folders, meshes, lambda number, dims: folders)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: str(tiny.random_checkpoint(zoo.cases()[name].hf, tmp_path_factory.mktemp("tiny"))) for name in CASES}


@pytest.fixture(scope="module")
def expected():
    return {name: stepping.reference(zoo.cases()[name].hf) for name in CASES}


@pytest.mark.parametrize("world_size", MESHES)
def test_every_mesh_trains_as_transformers_does(folders, expected, world_size):
    for results in zip(*pool.run(world_size, steps, folders, MESHES[world_size]), strict=True):
        tiny.assert_losses(results, expected[results[0][1]][0])
        for label, name, step in results:
            _, grads = expected[name]
            indexers = {n for n in step["grads"] if ".indexer." in n}
            biases = {n for n in step["grads"] if n.endswith("e_score_correction_bias")}  # buffers, without gradients
            assert step["grads"].keys() - biases - indexers == grads.keys(), label
            tiny.assert_near(step["grads"], grads, label)


def indexer_gradients(folder, sizes):
    """Runs in each worker: the gradients of the indexers from their own loss, by HF name."""
    dims = ParallelDims(**sizes)
    with stepping.mesh(dims):
        overrides = {"dsa_indexer_loss_coeff": 0.1}
        grads = stepping.train(folder, dims, tiny.tokens(4), micro_batch_size=2, overrides=overrides)["grads"]
        return {name: grad for name, grad in grads.items() if ".indexer." in name}


def test_the_loss_of_indexers_trains_them_alike_on_all_meshes(folders):
    (alone,) = pool.run(1, indexer_gradients, folders["deepseek_v32"], {})
    assert all(grad.any() for grad in alone.values())
    for together in pool.run(2, indexer_gradients, folders["deepseek_v32"], {"tp": 2, "sp": True}):
        assert max(tiny.relative_error(together[name], alone[name]) for name in alone) < 5e-5
