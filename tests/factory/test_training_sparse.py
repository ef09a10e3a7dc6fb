"""Sparse attention trains as in transformers, on every axis. The indexer only selects, so it gets no gradient."""

import pytest

from mcore_bridge import ParallelDims
from tests import zoo
from tests.support import pool, stepping, tiny
from tests.support.training import Kind

CASES = zoo.here(("deepseek_v32", "glm_moe_dsa-shared"))
MESHES = {
    2: [{"tp": 2, "sp": True}, {"pp": 2}, {"cp": 2}, {"ep": 2}],
    4: [{"tp": 4, "sp": True}, {"tp": 2, "cp": 2, "ep": 2, "sp": True}],
}
pytestmark = pytest.mark.skipif(not CASES, reason="sparse attention needs newer transformers and megatron-core")


KIND = Kind({name: zoo.cases()[name].hf for name in CASES}, MESHES)


@pytest.mark.parametrize("world_size", MESHES)
def test_every_mesh_trains_as_transformers_does(world_size, tmp_path):
    KIND.check(world_size, tmp_path)


def indexer_gradients(folder, sizes):
    """Runs in each worker: the gradients of the indexers from the indexer loss, by HF name."""
    dims = ParallelDims(**sizes)
    with stepping.mesh(dims):
        overrides = {"dsa_indexer_loss_coeff": 0.1}
        grads = stepping.train(folder, dims, tiny.tokens(4), micro_batch_size=2, overrides=overrides)["grads"]
        return {name: grad for name, grad in grads.items() if ".indexer." in name}


def test_the_loss_of_indexers_trains_them_alike_on_all_meshes(tmp_path):
    folder = str(tiny.random_checkpoint(zoo.cases()["deepseek_v32"].hf, tmp_path))
    (alone,) = pool.run(1, indexer_gradients, folder, {})
    assert all(grad.any() for grad in alone.values())
    for together in pool.run(2, indexer_gradients, folder, {"tp": 2, "sp": True}):
        assert max(tiny.relative_error(together[name], alone[name]) for name in alone) < 5e-5
