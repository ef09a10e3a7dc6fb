"""slime's ``convert_to_hf`` by our rules: HF tensors of one parameter that is whole already."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.blueprint import to_transformer_config
from mcore_bridge.weights.bound import axes_of_config
from mcore_bridge.weights.layout import Axes
from mcore_bridge.weights.mapping import WeightMapping
from mcore_bridge.weights.names import Numbering, canonical
from mcore_bridge.weights.provenance import provenance_of

_PREFIX = re.compile(r"^(?:module\.)+")


def convert_to_hf(
    args: Any,
    model_name: str,
    name: str,
    param: Tensor,
    quantization_config: Mapping[str, Any] | None = None,
    transform_ue8m0: bool = True,
) -> list[tuple[str, Tensor]]:
    """HF names and tensors of one parameter, in the signature of slime 0.3.1.

    Args:
        args: slime's arguments, of which ``hf_checkpoint`` is read, the HF folder, which says what the model is, and
            ``mtp_num_layers``.
        model_name: not read.
        name: of the parameter in a ``GPTModel``, with global numbers of layers and experts, wrappers and all.
        param: the whole parameter, gathered over tensor parallelism; a padded vocabulary is cut.
        quantization_config, transform_ue8m0: must ask for nothing.

    Returns:
        New, contiguous tensors; none of a head that is tied to the embedding.

    Raises:
        ConfigError: tensors are to be quantized, or the family has latent queries, whose tensors SGLang wants in one
            call together with those of keys and values, which parameters one by one do not give, or one tensor for all
            experts of a layer.
        MappingError: no rule has this name, or the shape does not fit.
    """
    if quantization_config is not None:
        raise ConfigError("quantization_config must be None, as we export bits as they are; quantize what this returns")
    mapping, axes, numbering = _known(str(args.hf_checkpoint), bool(getattr(args, "mtp_num_layers", None)))
    binding = mapping.bind(canonical(_PREFIX.sub("", name), numbering))
    if not binding.exported:
        return []
    parts = (~binding.layout)((param.detach()[None],), {**axes, "padded_vocab": param.shape[0]})
    names = (*binding.hf, *binding.copies)
    parts = (*parts, *(parts[0] for _ in binding.copies))
    return [(hf, part.clone(memory_format=torch.contiguous_format)) for hf, part in zip(names, parts, strict=True)]


@functools.cache
def _known(folder: str, mtp: bool) -> tuple[WeightMapping, Axes, Numbering]:
    """What a folder says of the names and sizes of its model, at one rank."""
    provenance = provenance_of(folder)
    if any(name.endswith(".q_a_proj.weight") for rule in provenance.rules for name in rule.hf) and getattr(
        provenance.hf, "q_lora_rank", None
    ):
        raise ConfigError(
            f"{provenance.hf.model_type} has latent queries, which SGLang fuses with the latents of keys and values of "
            "one load_weights call: export it by iter_hf_weights, which gives them out together"
        )
    mapping = provenance.mapping(tied=bool(provenance.hf.tie_word_embeddings), mtp=mtp, dialect="split")
    if any(name.endswith("[*]") for rule in mapping.rules for name in rule.hf):
        raise ConfigError(
            f"{provenance.hf.model_type} has one tensor for all experts of a layer, of which a parameter is a part: "
            "export it by iter_hf_weights, which puts them together"
        )
    config = to_transformer_config(folder)
    axes = axes_of_config(config, vocab=provenance.hf.vocab_size, padded_vocab=provenance.hf.vocab_size)
    layers, experts = tuple(range(config.num_layers)), tuple(range(config.num_moe_experts or 0))
    return mapping, axes, Numbering(layers, experts, tuple(range(len(layers))))
