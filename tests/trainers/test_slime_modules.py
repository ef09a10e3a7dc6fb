"""slime's own loaders, updates, savers and tools use the library. docs/trainers/slime.md says how to install slime."""

import importlib.util

import pytest
import torch

from mcore_bridge import ParallelDims
from tests.support import pool
from tests.support.rlinf_models import LATENT, SPARSE
from tests.support.strategies import random_state, save, tiny
from tests.support.target_models import assert_gets
from tests.workers import slime_rank

_MISSING = [name for name in ("slime", "ray") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(_MISSING), reason=f"not installed: {_MISSING}"),
    pytest.mark.usefixtures("own_workers"),
]

DENSE, MESH = ParallelDims(tp=2, pp=2, sp=True), ParallelDims(tp=2, pp=2, ep=2, sp=True)
LAYERS = {"num_hidden_layers": 4, "num_nextn_predict_layers": 0}
FAMILIES = {
    "qwen2": tiny("qwen2", tie_word_embeddings=True, vocab_size=97, num_key_value_heads=2),
    "qwen3_moe": SPARSE,
    "deepseek_v3": type(LATENT).from_dict(LATENT.to_dict() | LAYERS),
    "gpt_oss": tiny("gpt_oss", num_local_experts=8, num_experts_per_tok=2, num_key_value_heads=2),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    return slime_rank.copy_with_diffs(tmp_path_factory.mktemp("slime"))


def checkpoint(folder, family):
    """A folder of bf16 tensors, and these tensors."""
    folder.mkdir(exist_ok=True)
    state = random_state(FAMILIES[family], dtype=torch.bfloat16)
    save(state, FAMILIES[family], folder)
    return state


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "deepseek_v3"])
def test_a_load_fills_parameters_as_slimes_own_loader(family, copy, tmp_path):
    checkpoint(tmp_path, family)
    dims = DENSE if family == "qwen2" else MESH
    assert family != "qwen2" or pool.run(4, slime_rank.critic, copy, dims, str(tmp_path)) == [True] * 4
    assert pool.run(4, slime_rank.loads, copy, dims, str(tmp_path)) == [[]] * 4


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_every_caller_gives_every_tensor(family, copy, tmp_path):
    """Tensors that only some ranks get are the experts of the engine's rank."""
    state = checkpoint(tmp_path / "hf", family)
    ranks = pool.run(4, slime_rank.sent, copy, MESH, str(tmp_path / "hf"), str(tmp_path / "saved"))
    for rank, found in enumerate(ranks):
        assert_gets(found["iterator"], state)
        assert_gets(found["saver"], state)
        routed = {name for name in state if family != "gpt_oss" and ".experts." in name}
        own = {name for name in routed if f"experts.{2 * rank}." in name or f"experts.{2 * rank + 1}." in name}
        assert found["experts"].keys() == own
        assert_gets(found["tensor"], {name: state[name] for name in state if name in own or name not in routed})
    sources = [found["distributed"] for found in ranks if found["distributed"]]
    assert len(sources) == 2
    assert not sources[0].keys() & sources[1].keys()
    assert_gets(sources[0] | sources[1], state)


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_both_tools_give_every_tensor(family, copy, tmp_path):
    state = checkpoint(tmp_path / "hf", family)
    ranks = pool.run(4, slime_rank.tool, copy, MESH, str(tmp_path / "hf"), str(tmp_path))
    assert len(ranks[0]) == 2
    for found in ranks[0]:
        assert_gets(found, state)
