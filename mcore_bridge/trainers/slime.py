"""slime's ``convert_to_hf`` with our rules: from one whole parameter to HF tensors.

With latent queries, the first of a layer's two latents is kept until the second comes. SGLang fuses ``q_a_proj`` and
``kv_a_proj_with_mqa`` within one load call. If it gets them in two calls, it ignores both without an error.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_bridge.errors import ConfigError, ExportError
from mcore_bridge.factory.gpt_inputs import to_transformer_config
from mcore_bridge.factory.vision.tower import tower_specs
from mcore_bridge.rules.layout import Axes
from mcore_bridge.rules.mapping import WeightMapping
from mcore_bridge.rules.names import TOWER, Numbering
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.trainers.one_parameter import binding_of
from mcore_bridge.weights.bound import axes_of_config
from mcore_bridge.weights.files.hf_folder import shard_names
from mcore_bridge.weights.provenance import provenance_of
from mcore_bridge.weights.sent.encoding import encoded_tensors
from mcore_bridge.weights.source.weight_format import is_linear, weight_format

Named = tuple[str, Tensor]

_PREFIX = re.compile(r"^(?:module\.)+(?:language_model\.)?")
"""Prefixes of wrappers, and of the ``GPTModel`` inside slime's own models of images."""
_LATENT = re.compile(r"(?P<attention>.+)\.(?:q_a_proj|kv_a_proj_with_mqa)\.weight")
_HELD: dict[str, dict[str, Named]] = {}
"""The first latent of a layer, which is kept until the second comes, by HF folder and attention."""


def convert_to_hf(
    args: Any,
    model_name: str,
    name: str,
    param: Tensor,
    quantization_config: Mapping[str, Any] | None = None,
    transform_ue8m0: bool = True,
) -> list[Named]:
    """HF names and tensors of one parameter, with the signature of slime 0.3.1.

    Args:
        args: slime's arguments. Only ``hf_checkpoint``, the HF folder of the model, and ``mtp_num_layers`` are read.
        model_name: without effect.
        name: the name of the parameter in a ``GPTModel``, with global numbers of layers and experts, and with wrappers.
            Parameters of slime's own models of images have their HF names.
        param: the whole parameter, gathered over tensor parallelism. A padded vocabulary is cut.
        quantization_config: of the engine's folder, as in its config.json. If ``hf_checkpoint`` has encoded weights,
            its format is used, and scales that still fit are kept. None: tensors are plain.
        transform_ue8m0: without effect. Scales are those of files; an engine that packs them does so itself.

    Returns:
        New, contiguous tensors; none for a head that is tied to the embedding. With latent queries, none for the first
        of a layer's ``q_a_proj`` and ``kv_a_proj_with_mqa``, and both for the second. If a pass over the parameters
        ends without the second, the first is missing, and the next pass raises.

    Raises:
        ConfigError: the format is not supported, or the family has one tensor for all experts of a layer. Or the
            parameter belongs to an adapter or to a ``HybridModel``.
        ExportError: a latent came again before the other one of its layer. All latents that were kept for this folder
            are dropped, so that a new pass can start.
        MappingError: no rule has this name, or the shape does not fit.
    """
    folder = str(args.hf_checkpoint)
    name = _PREFIX.sub("", name)
    model = _known(folder, getattr(args, "mtp_num_layers", None) or 0, name.startswith(TOWER))
    if name.startswith("model.") and model.mapping.is_not_built(name):
        return [(name, param.detach().clone(memory_format=torch.contiguous_format))]
    binding = binding_of(name, model.mapping, model.numbering, "iter_hf_weights")
    if not binding.exported:
        return []
    parts = (~binding.layout)((param.detach()[None],), {**model.axes, "padded_vocab": param.shape[0]})
    names = (*binding.hf, *binding.copies)
    parts = (*parts, *(parts[0] for _ in binding.copies))
    pairs = [(hf, part.clone(memory_format=torch.contiguous_format)) for hf, part in zip(names, parts, strict=True)]
    latent = _LATENT.fullmatch(names[0]) if model.has_latent_queries else None
    if latent:
        pairs = _paired(_HELD.setdefault(folder, {}), latent["attention"], pairs[0])
    return _encoded(pairs, folder, quantization_config) if is_linear(binding.mcore) else pairs


def _encoded(pairs: list[Named], folder: str, note: Mapping[str, Any] | None) -> list[Named]:
    """The codes and scales of whole weights, in the format of the folder, or else by the description ``note``."""
    has_files = note is not None and shard_names(Path(folder))
    form = weight_format("as_published" if has_files else None, folder)
    if not form.is_encoded:
        form = weight_format(note, folder)
    scheme = form.scheme_for(TensorSpec.of(name, tensor) for name, tensor in pairs)
    return [pair for name, tensor in pairs for pair in encoded_tensors(name, tensor, scheme, form)]


def _paired(held: dict[str, Named], attention: str, latent: Named) -> list[Named]:
    """Both latents of ``attention`` if the other is already in ``held``; else keep this one and return nothing.

    Raises:
        ExportError: this latent is already kept. Then all are dropped.
    """
    first = held.setdefault(attention, latent)  # one atomic step: slime's converter of files calls from several threads
    if first is latent:
        return []
    if first[0] == latent[0]:
        held.clear()
        (other,) = {"q_a_proj", "kv_a_proj_with_mqa"} - {latent[0].split(".")[-2]}
        raise ExportError(
            f"expected {attention}.{other}.weight, found {latent[0]} a second time: engines need the two in one "
            "call, and a pass over the parameters passes each once. An earlier pass ended between them, or left one "
            "out: pass both, and begin this pass again. All kept latents were dropped"
        )
    del held[attention]
    return [first, latent]


@dataclass(frozen=True, slots=True)
class _Model:
    """The names and sizes of the parameters of a model without parallelism."""

    mapping: WeightMapping
    axes: Axes
    numbering: Numbering
    has_latent_queries: bool
    """Whether queries have latents. Otherwise only keys and values have latents, and nothing has to be kept."""


@functools.cache
def _known(folder: str, mtp: int, vision: bool) -> _Model:
    """The model of an HF folder, read once.

    Raises:
        ConfigError: the family has one tensor for all experts of a layer.
    """
    provenance = provenance_of(folder)
    if vision and provenance.whole is not None:
        provenance = provenance.seeing("train", tower_specs(provenance.whole, torch.bfloat16))
    mapping = provenance.mapping(tied=bool(provenance.hf.tie_word_embeddings), mtp=mtp, expert_format="split")
    if any(name.endswith("[*]") for rule in mapping.rules for name in rule.hf):
        # We cannot wait for all experts: if an engine distributes experts, slime passes only some of them.
        raise ConfigError(
            f"{provenance.hf.model_type} has one tensor for all experts of a layer, of which a parameter is a part: "
            "export it with iter_hf_weights, which joins them"
        )
    config = to_transformer_config(folder)
    axes = axes_of_config(config, vocab=provenance.hf.vocab_size, padded_vocab=provenance.hf.vocab_size)
    layers, experts = tuple(range(config.num_layers)), tuple(range(config.num_moe_experts or 0))
    latent_queries = bool(getattr(provenance.hf, "q_lora_rank", None))
    return _Model(mapping, axes, Numbering(layers, experts, tuple(range(len(layers)))), latent_queries)
