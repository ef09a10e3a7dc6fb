"""Loss, gradients and a step of the families of ``zoo/plain.py``, on meshes that split sequences and heads."""

from functools import cache
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from tests import zoo
from tests.support import pool, tiny
from tests.support.training import LR, steps
from tests.zoo.plain import BIASED, PHI, TEMPERED, YARN, longrope, partial

UNDROPPED = {"attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0}
CASES = {  # texts have 16 tokens, none of them the padding, which transformers does not train
    "layer norms, no gate": zoo.case("starcoder2", hidden_size=192, sliding_window=5, **UNDROPPED),
    "layer norms around one": zoo.case("nemotron", **BIASED, **partial(0.5)),
    "fused, longrope": zoo.case("phi3", **PHI, **longrope(8, original=8), tie_word_embeddings=True),
    "temperature": zoo.case(
        "ministral3", pad_token_id=95, **zoo.rope("yarn", **YARN | TEMPERED | {"original_max_position_embeddings": 5})
    ),
}
MESHES: dict[int, list[dict[str, Any]]] = {
    2: [{"tp": 2, "sp": True}, {"cp": 2}],
    4: [{"tp": 4, "sp": True}, {"tp": 2, "cp": 2, "sp": True}, {"pp": 4, "layout": "Et|tt|t|L"}],
}


@cache
def expected(name: str) -> tuple[Any, dict[str, dict[str, Any]]]:
    """transformers' loss, and its gradients and weights after a step of SGD."""
    model = tiny.random_model(CASES[name].hf)
    _, loss, grads = tiny.reference(model, tiny.tokens(16))
    return loss, {"grads": grads, "weights": {n: p.detach() - LR * grads[n] for n, p in model.named_parameters()}}


@pytest.mark.parametrize("world_size", MESHES)
def test_every_mesh_trains_as_transformers_does(world_size: int, tmp_path: Any) -> None:
    names = [name for name, case in CASES.items() if case.model_type in CONFIG_MAPPING]
    folders = {name: str(tiny.random_checkpoint(CASES[name].hf, tmp_path / name)) for name in names}
    for results in zip(*pool.run(world_size, steps, folders, MESHES[world_size], 2), strict=True):
        tiny.assert_losses(results, expected(results[0][1])[0])
        for label, name, step in results:
            _, truths = expected(name)
            for which, truth in truths.items():
                tiny.assert_near(step[which], truth, f"{label}: {which}")
