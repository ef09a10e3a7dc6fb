"""How much an HF model holds, and where: counted on transformers' own model without storage, never estimated."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from mcore_bridge.architecture import architecture_of
from mcore_bridge.config.balance import balanced
from mcore_bridge.config.hf import as_owner
from mcore_bridge.config.parallel import ParallelDims
from mcore_bridge.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_EXPERTS = ".experts."


@dataclass(frozen=True, slots=True)
class Census:
    """Numbers of parameters: of each layer, of the embedding, of the LM head (0 when tied) and of the rest.

    ``experts`` are those of the routed experts among a layer's.
    """

    layers: tuple[int, ...]
    experts: tuple[int, ...]
    embedding: int
    lm_head: int
    rest: int

    @property
    def total(self) -> int:
        """Of the whole causal LM, counting once what is tied."""
        return sum(self.layers) + self.embedding + self.lm_head + self.rest


def census(hf: PretrainedConfig) -> Census:
    """Count the parameters of transformers' causal LM of ``hf``.

    Raises:
        ConfigError: transformers has no causal LM for this config.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    try:
        with init_empty_weights(include_buffers=True):
            model = AutoModelForCausalLM.from_config(as_owner(hf, architecture_of(hf).counts_as))
    except ValueError as error:
        raise ConfigError(f"transformers must have a causal LM for model_type {hf.model_type!r}: {error}") from None
    layers, experts = [0] * hf.num_hidden_layers, [0] * hf.num_hidden_layers
    for name, parameter in model.named_parameters():
        if layer := _LAYER.search(name):
            layers[int(layer[1])] += parameter.numel()
            experts[int(layer[1])] += parameter.numel() * (_EXPERTS in name)
    total = sum(parameter.numel() for parameter in model.parameters())
    embedding = model.get_input_embeddings().weight.numel()
    lm_head = 0 if hf.tie_word_embeddings else model.get_output_embeddings().weight.numel()
    return Census(tuple(layers), tuple(experts), embedding, lm_head, total - sum(layers) - embedding - lm_head)


def resolve_layout(
    dims: ParallelDims, hf: PretrainedConfig, *, dtype: torch.dtype, head: str = "lm", num_mtp_layers: int = 0
) -> ParallelDims:
    """``dims`` with ``layout="balanced"`` replaced by the explicit layout that balances the bytes of the ranks.

    A rank holds ``1 / (ep * etp)`` of the routed experts and about ``1 / tp`` of all else.

    Args:
        dims: returned as they are when their layout is not "balanced".
        hf: the model.
        dtype: of its parameters.
        head: the last stage holds a matrix of the vocabulary for "lm" (a copy when tied), and for no other.
        num_mtp_layers: they go to the last stage, with a copy of the embedding.
    """
    if dims.layout != "balanced":
        return dims
    counted = census(hf)
    each = dims.ep * dims.etp * dtype.itemsize  # bytes of a parameter on a rank, as multiples of 1 / (tp * ep * etp)
    each_of_experts = dims.tp * dtype.itemsize
    layers = [
        (layer - experts) * each + experts * each_of_experts
        for layer, experts in zip(counted.layers, counted.experts, strict=True)
    ]
    loss = (counted.rest + (counted.embedding if head == "lm" else 0)) * each
    if num_mtp_layers:
        loss += num_mtp_layers * (layers[-1] + 2 * hf.hidden_size**2 * each) + counted.embedding * each
    found = balanced(dims, layer_bytes=layers, embedding_bytes=counted.embedding * each, loss_bytes=loss)
    assert found.layout is not None
    return replace(found, layout=f"{found.layout.removesuffix('L')}{'m' * num_mtp_layers}L")
