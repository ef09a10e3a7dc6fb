"""Loss, gradients and a step of the families of ``zoo/plain.py``, on meshes that split sequences and heads."""

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from tests import zoo
from tests.support.training import Kind, check_recompute
from tests.zoo.plain import BIASED, PHI, TEMPERED, YARN, longrope, partial
from tests.zoo.texts import GLIMMER

UNDROPPED = {"attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0}
CASES = {  # no text has the token of the padding, which transformers does not train
    "layer norms, no gate": zoo.case("starcoder2", hidden_size=192, sliding_window=5, **UNDROPPED),
    "layer norms around one": zoo.case("nemotron", **BIASED, **partial(0.5)),
    "fused, longrope": zoo.case("phi3", **PHI, **longrope(8, original=8), tie_word_embeddings=True),
    "learned activation": zoo.case(
        "apertus", intermediate_size=128, attention_bias=True, pad_token_id=95, **zoo.rope("default")
    ),
    "norms without weights": zoo.case("muse_glimmer_text", **GLIMMER, attention_bias=True, **zoo.rope("default")),
    "temperature": zoo.case(
        "ministral3", pad_token_id=95, **zoo.rope("yarn", **YARN | TEMPERED | {"original_max_position_embeddings": 5})
    ),
}
MESHES: dict[int, list[dict[str, Any]]] = {
    2: [{"tp": 2, "sp": True}, {"cp": 2}, {"tp": 2}],
    4: [{"tp": 4, "sp": True}, {"tp": 2, "cp": 2, "sp": True}, {"pp": 4, "layout": "Et|tt|t|L"}],
}
KIND = Kind({name: case.hf for name, case in CASES.items() if case.model_type in CONFIG_MAPPING}, MESHES, every=2)


@pytest.mark.parametrize("world_size", MESHES)
def test_every_mesh_trains_as_transformers_does(world_size, tmp_path):
    KIND.check(world_size, tmp_path)


def test_recompute_changes_nothing(tmp_path):
    for name in {"learned activation", "norms without weights"} & KIND.models.keys():
        check_recompute(CASES[name].hf, ["core_attn", "mlp"], tmp_path / name)
