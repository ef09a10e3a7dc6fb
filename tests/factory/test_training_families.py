"""Each kind of layer trains as in transformers: parameters that ranks share get whole gradients, with and without SP.

megatron-core refuses to train experts under TP without SP, and to cut experts that have biases.
"""

from typing import Any

import pytest

from mcore_bridge import ParallelDims
from tests import zoo
from tests.support.training import Kind

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


def fits(name: str, dims: ParallelDims) -> bool:
    return (dims.etp == 1 or name != "gpt_oss") and (dims.tp == 1 or dims.sp or name in WITHOUT_EXPERTS)


KIND = Kind({name: zoo.cases()[name].hf for name in CASES}, MESHES, every=2, fits=fits)


@pytest.mark.parametrize("every", [None, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("world_size", MESHES)
def test_every_mesh_trains_as_transformers_does(world_size, every, tmp_path):
    KIND.check(world_size, tmp_path, every=every)
