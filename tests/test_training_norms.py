"""Loss and gradients where norms stand elsewhere, scores are capped and layers rotate apart: as ``test_training``."""

from functools import cache
from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from tests import pool, test_training, tiny
from tests.test_training import LR, steps
from tests.zoo.norms import HUNYUAN, WINDOWED, ropes

MESHES: dict[int, list[dict[str, Any]]] = {  # the first family and every third of them on the first mesh, and so on
    2: [{"tp": 2, "sp": True}, {"tp": 2, "sp": True}, {"pp": 2, "vp": 2}, {"cp": 2}],
    4: [{"tp": 4, "sp": True}, {"tp": 4}, {"tp": 2, "cp": 2, "sp": True}, {"tp": 2, "sp": True, "pp": 2, "vp": 2}],
}


def config(model_type: str, **changes: Any) -> PretrainedConfig:
    """Two groups of keys, so that four ranks share them. transformers gives the row of a padding token no gradient."""
    runs = {"pad_token_id": None, "attn_implementation": "eager"}  # the default of transformers 4 drops soft caps
    sizes = {**tiny.DISTINCT, **tiny.COMMON, "num_key_value_heads": 2, **runs}
    return AutoConfig.for_model(model_type, **{**sizes, **changes})


CAPPED = {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 0.7, "final_logit_softcapping": 2.0}
CASES = {
    "olmo2": config("olmo2", attention_bias=True),
    "olmo3, tied": config(
        "olmo3", tie_word_embeddings=True, **WINDOWED, **ropes({"rope_type": "default"}, sliding_base=50000.0)
    ),
    "gemma2": config("gemma2", **WINDOWED, **CAPPED, attention_bias=True, tie_word_embeddings=True),
    "gemma3": config("gemma3_text", **WINDOWED, **ropes({"rope_type": "linear", "factor": 4.0})),
    "hunyuan": config("hunyuan_v1_dense", attention_bias=True, rope_scaling=HUNYUAN),
    "glm4": config("glm4", tie_word_embeddings=True, head_dim=16),
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
    monkeypatch.setattr(test_training, "expected", expected)
    folders = {name: str(folder) for name, folder in checkpoints.items()}
    test_training.assert_equal_to_transformers(pool.run(world_size, steps, folders, MESHES[world_size], 3))
