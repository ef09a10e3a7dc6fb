"""The number of parameters, computed from a config alone, compared with the models of transformers."""

import re

import pytest
from transformers import PretrainedConfig

from mcore_bridge.factory.param_count import ParamCounts, count_inner, count_params
from tests import zoo
from tests.support import mtp_checkpoints
from tests.support.strategies import random_state

LAYER = re.compile(r"^(?:(?:model|gpt_neox|backbone)\.)?layers\.(\d+)\.")
EMBEDDING = (
    *("model.embed_tokens.weight", "gpt_neox.embed_in.weight", "backbone.embeddings.weight", "embed.weight"),
    *("model.word_embeddings.weight", "model.embed_tokens_per_layer.weight"),
    *("model.per_layer_model_projection.weight", "model.per_layer_projection_norm.weight"),
)
HEAD = ("lm_head.weight", "lm_head.bias", "embed_out.weight", "head.weight")
EXPERTS = (
    ".experts.",
    ".block_sparse_moe.input_linear.",
    ".block_sparse_moe.output_linear.",
    "moe.gate_proj.",
    "moe.up_proj.",
    "moe.down_proj.",
)


def counted(hf: PretrainedConfig) -> ParamCounts:
    """The number of parameters in the checkpoint of transformers' model."""
    sizes = {name: tensor.numel() for name, tensor in random_state(hf).items()}
    layers, experts = [0] * hf.num_hidden_layers, [0] * hf.num_hidden_layers
    for name, size in sizes.items():
        if layer := LAYER.match(name):
            layers[int(layer[1])] += size
            is_router = name.endswith("e_score_correction_bias")
            experts[int(layer[1])] += size * (not is_router and any(part in name for part in EXPERTS))
    embedding, lm_head = (sum(sizes.get(name, 0) for name in names) for names in (EMBEDDING, HEAD))
    rest = sum(sizes.values()) - sum(layers) - embedding - lm_head
    return ParamCounts(tuple(layers), tuple(experts), embedding, lm_head, rest)


@pytest.mark.parametrize("name", zoo.params(mtp_checkpoints.NAMES))
def test_mtp_layers_count_what_their_publisher_holds(name: str) -> None:
    hf = mtp_checkpoints.config(name)
    held = counted(mtp_checkpoints.one_layer(hf))
    assert count_inner(hf) == (sum(held.layers), sum(held.experts))


@pytest.mark.parametrize("name", zoo.params(zoo.written()))
def test_the_census_counts_what_transformers_holds(name: str) -> None:
    hf = zoo.cases()[name].hf
    assert count_params(hf) == counted(hf)
