"""Each kind of layer trains as transformers does: what ranks share gets whole gradients, with and without SP.

megatron-core refuses to train experts under TP without SP, and to cut experts that have biases.
"""

from typing import Any

import pytest

from mcore_bridge import ParallelDims
from tests import zoo
from tests.support import pool, stepping, tiny

CASES = ("deepseek_v3", "deepseek_v3-yarn", "deepseek_v2", "qwen2_moe", "gpt_oss", "llama4")
WITHOUT_EXPERTS = ("deepseek_v3-yarn",)
MESHES: dict[int, list[dict[str, Any]]] = {
    2: [{"tp": 2}, {"tp": 2, "sp": True}, {"tp": 2, "etp": 2, "sp": True}, {"pp": 2, "vp": 2}, {"cp": 2}, {"ep": 2}],
    4: [
        {"tp": 4},
        {"tp": 2, "sp": True, "ep": 2},
        {"tp": 2, "cp": 2, "ep": 2, "sp": True},
        {"tp": 2, "etp": 2, "ep": 2, "sp": True},
    ],
}


def steps(folders: dict[str, str], meshes: list[dict[str, Any]], every: int) -> list[Any]:
    """Runs in each worker: a step on each mesh, of ``every`` so many cases in turn."""

    def names_on(number: int, dims: ParallelDims) -> list[str]:
        names = WITHOUT_EXPERTS if dims.tp > 1 and not dims.sp else CASES[number % every :: every]
        return [name for name in names if name != "gpt_oss" or dims.etp == 1]

    return stepping.train_cases(folders, meshes, names_on)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: str(tiny.random_checkpoint(zoo.cases()[name].hf, tmp_path_factory.mktemp("tiny"))) for name in CASES}


@pytest.fixture(scope="module")
def expected():
    return {name: stepping.reference(zoo.cases()[name].hf) for name in CASES}


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("world_size", MESHES)
def test_every_mesh_trains_as_transformers_does(folders, expected, world_size, every):
    for results in zip(*pool.run(world_size, steps, folders, MESHES[world_size], every, timeout=600), strict=True):
        tiny.assert_losses(results, expected[results[0][1]][0])
        for label, name, step in results:
            _, grads = expected[name]
            biases = {n for n in step["grads"] if n.endswith("e_score_correction_bias")}  # buffers, without gradients
            assert step["grads"].keys() - biases == grads.keys(), label
            tiny.assert_near(step["grads"], grads, label)
