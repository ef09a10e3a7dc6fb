"""slime's ``convert_to_hf`` by our rules: HF tensors of one parameter that is whole already.

With latent queries, the first of a layer's two latents waits here for the second: SGLang fuses ``q_a_proj`` with
``kv_a_proj_with_mqa`` of one load call, and without a word leaves them as they were when they come in two.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_bridge.errors import ConfigError, ExportError
from mcore_bridge.factory.blueprint import to_transformer_config
from mcore_bridge.rules.layout import Axes
from mcore_bridge.rules.mapping import WeightMapping
from mcore_bridge.rules.names import Numbering, canonical
from mcore_bridge.weights.bound import axes_of_config
from mcore_bridge.weights.provenance import provenance_of

Named = tuple[str, Tensor]

_PREFIX = re.compile(r"^(?:module\.)+")
_LATENT = re.compile(r"(?P<attention>.+)\.(?:q_a_proj|kv_a_proj_with_mqa)\.weight")
_HELD: dict[str, dict[str, Named]] = {}
"""By HF folder and attention: the latent that came first, while the other one of its layer has not come."""


def convert_to_hf(
    args: Any,
    model_name: str,
    name: str,
    param: Tensor,
    quantization_config: Mapping[str, Any] | None = None,
    transform_ue8m0: bool = True,
) -> list[Named]:
    """HF names and tensors of one parameter, in the signature of slime 0.3.1.

    Args:
        args: slime's arguments, of which ``hf_checkpoint`` is read, the HF folder, which says what the model is, and
            ``mtp_num_layers``.
        model_name: not read.
        name: of the parameter in a ``GPTModel``, with global numbers of layers and experts, wrappers and all.
        param: the whole parameter, gathered over tensor parallelism; a padded vocabulary is cut.
        quantization_config, transform_ue8m0: must ask for nothing.

    Returns:
        New, contiguous tensors; none of a head that is tied to the embedding. With latent queries, none of the first of
        a layer's ``q_a_proj`` and ``kv_a_proj_with_mqa`` to come, and both of the second. When a pass over the
        parameters ends without the second, the first is missing, which the next pass raises for.

    Raises:
        ConfigError: tensors are to be quantized, or the family has one tensor for all experts of a layer.
        ExportError: a latent came again before the other one of its layer. All that were held back for this folder are
            dropped, so that the next pass starts anew.
        MappingError: no rule has this name, or the shape does not fit.
    """
    if quantization_config is not None:
        raise ConfigError("quantization_config must be None, as we export bits as they are; quantize what this returns")
    folder = str(args.hf_checkpoint)
    model = _known(folder, bool(getattr(args, "mtp_num_layers", None)))
    binding = model.mapping.bind(canonical(_PREFIX.sub("", name), model.numbering))
    if not binding.exported:
        return []
    parts = (~binding.layout)((param.detach()[None],), {**model.axes, "padded_vocab": param.shape[0]})
    names = (*binding.hf, *binding.copies)
    parts = (*parts, *(parts[0] for _ in binding.copies))
    found = [(hf, part.clone(memory_format=torch.contiguous_format)) for hf, part in zip(names, parts, strict=True)]
    latent = _LATENT.fullmatch(names[0]) if model.has_latent_queries else None
    return _paired(_HELD.setdefault(folder, {}), latent["attention"], found[0]) if latent else found


def _paired(held: dict[str, Named], attention: str, latent: Named) -> list[Named]:
    """Both latents of ``attention`` when one of them is ``held`` already; else none, and this one is held.

    Raises:
        ExportError: this one is held already. Nothing is held any more then.
    """
    first = held.setdefault(attention, latent)  # in one step: slime's converter of files calls from several threads
    if first is latent:
        return []
    if first[0] == latent[0]:
        held.clear()
        (other,) = {"q_a_proj", "kv_a_proj_with_mqa"} - {latent[0].split(".")[-2]}
        raise ExportError(
            f"expected {attention}.{other}.weight, found {latent[0]} a second time: engines take the two in one call, "
            "and a pass over the parameters hands over each once. An earlier pass ended between them, or left one out: "
            "hand over both, and begin this pass again. Nothing is held back any more"
        )
    del held[attention]
    return [first, latent]


@dataclass(frozen=True, slots=True)
class _Model:
    """What a folder says of a model: the names and sizes of its parameters at one rank."""

    mapping: WeightMapping
    axes: Axes
    numbering: Numbering
    has_latent_queries: bool
    """Else the latents of keys and values are alone, and nothing is to wait for."""


@functools.cache
def _known(folder: str, mtp: bool) -> _Model:
    """What a folder says of its model, read once.

    Raises:
        ConfigError: the family has one tensor for all experts of a layer.
    """
    provenance = provenance_of(folder)
    mapping = provenance.mapping(tied=bool(provenance.hf.tie_word_embeddings), mtp=mtp, dialect="split")
    if any(name.endswith("[*]") for rule in mapping.rules for name in rule.hf):
        # Not held back until all are there: where the engine spreads experts, slime hands a rank its engine's alone.
        raise ConfigError(
            f"{provenance.hf.model_type} has one tensor for all experts of a layer, of which a parameter is a part: "
            "export it by iter_hf_weights, which puts them together"
        )
    config = to_transformer_config(folder)
    axes = axes_of_config(config, vocab=provenance.hf.vocab_size, padded_vocab=provenance.hf.vocab_size)
    layers, experts = tuple(range(config.num_layers)), tuple(range(config.num_moe_experts or 0))
    latent_queries = bool(getattr(provenance.hf, "q_lora_rank", None))
    return _Model(mapping, axes, Numbering(layers, experts, tuple(range(len(layers)))), latent_queries)
