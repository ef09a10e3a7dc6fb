"""Layer specs for multi-token prediction (MTP): layers after the decoder, each around a decoder layer, in any stage."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from mcore_bridge.config.layer_kinds import MTP_KINDS, held_mtp_layers, inner_config, inner_letters, layers_of
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.backend import Backend, norm_of
from mcore_bridge.installed import Release
from mcore_bridge.weights.model_tensors import held_tensors

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

    from mcore_bridge.weights.provenance import Provenance

_FIRST = {
    False: "mtp.layers.*.transformer_layer.mlp.linear_fc1.weight",
    True: "mtp.layers.*.transformer_layer.mlp.experts.*.linear_fc1.weight",
}
"""The name of a weight, by whether the layer within an MTP layer has experts. It has a rule if a file may have it."""
HIDDEN_FIRST = "mtp.layers.*.eh_proj.hidden_first.weight"
REPEATED = Release("0.19", "earlier releases have a separate layer for each prediction")


def count_mtp(overrides: Mapping[str, object], *, head: str) -> tuple[int, int]:
    """How many tokens MTP layers predict, and by how many layers.

    Raises:
        ConfigError: the number is none, or the head predicts no tokens, or the release is too old.
    """
    wanted = overrides.get("mtp_num_layers")
    if wanted is not None and (type(wanted) is not int or wanted < 0):
        raise ConfigError(
            f"mtp_num_layers must be a whole number of at least 0, or None, found {wanted!r}: change mtp_num_layers"
        )
    if overrides.get("mtp_use_repeated_layer"):
        REPEATED.require("mtp_use_repeated_layer")
    if wanted and head != "lm":
        raise ConfigError(
            f"mtp_num_layers must be 0 or None with head={head!r}, found {wanted}: MTP layers predict tokens, "
            "which needs an LM head. Remove mtp_num_layers"
        )
    return wanted or 0, held_mtp_layers(overrides)


def require_mtp(provenance: Provenance, config: TransformerConfig) -> None:
    """Raise ``ConfigError`` if the model would have MTP layers that we cannot build, or that have no names."""
    wanted, kinds = held_mtp_layers(vars(config)), getattr(config, "mtp_kinds", None)
    if wanted and kinds not in (None, *MTP_KINDS):
        raise ConfigError(
            f"mtp_layers_block_type must be one of {', '.join(map(repr, MTP_KINDS))}, found {kinds!r}, where * is "
            "attention, - an MLP, E experts and M a Mamba-2 mixer. No published model has others: remove mtp_num_layers"
        )
    if wanted and kinds is not None and "E" in kinds and config.num_moe_experts is None:
        raise ConfigError(
            f"mtp_num_layers must be 0 or None, found {wanted}: mtp_layers_block_type has experts, and no layer of the "
            "decoder has any. No published model is so: remove mtp_num_layers"
        )
    if wanted and kinds is None and config.num_moe_experts:
        _require_named(provenance, config, wanted)
    pattern = getattr(config, "mtp_hybrid_override_pattern", None)
    if pattern is not None and pattern != inner_letters(config):
        raise ConfigError(
            f"mtp_hybrid_override_pattern must be {inner_letters(config)!r}, as the HF config says, found {pattern!r}: "
            "megatron-core reads it for old checkpoints alone. Remove the override"
        )
    counts = {rule.count for rule in provenance.rules if rule.mcore.startswith("mtp.layers.*")}
    known = min((count for count in counts if count is not None), default=wanted if counts else 0)
    if wanted > known:
        repeated = ", or repeat one layer by mtp_use_repeated_layer" if known and REPEATED.is_installed else ""
        raise ConfigError(
            f"mtp_num_layers must be at most {known}, found {wanted}: with this HF config, {provenance.hf.model_type} "
            f"has names for no more MTP layers. Change mtp_num_layers, or set their number in the HF config{repeated}"
        )


def _require_named(provenance: Provenance, config: TransformerConfig, wanted: int) -> None:
    """Raise ``ConfigError`` if MTP layers would have experts, or an MLP, that files of the family lack."""
    names = {rule.mcore for rule in provenance.rules if rule.mcore.startswith("mtp.")}
    sparse = bool(layers_of(vars(inner_config(config)))[-1])
    if names and _FIRST[sparse] not in names:
        which = "last" if getattr(config, "mtp_like_layer", None) is None else "first"
        has, have = ("has experts", "none") if sparse else ("has no experts", "some")
        raise ConfigError(
            f"mtp_num_layers must be 0 or None, found {wanted}: MTP layers are built like the {which} layer, which "
            f"{has} here, and those of {provenance.hf.model_type} have {have}. Remove mtp_num_layers, or keep more "
            "layers"
        )


def inner_spec(config: TransformerConfig, layer_spec: Callable[..., Any], *, backend: Backend) -> Any:
    """The spec of the layer within an MTP layer, from a function that makes specs of decoder layers."""
    from mcore_bridge.factory.modules.layer_rope import use_inner_rope

    own = inner_config(config)
    spec = layer_spec(own, range(own.num_layers - 1, own.num_layers), backend=backend).layer_specs[0]
    use_inner_rope(spec.submodules, config)
    return spec


def multiplies_hidden_first(provenance: Provenance) -> bool:
    """Whether the projections of a family's MTP layers multiply hidden states, then the embedding."""
    return any(rule.mcore == HIDDEN_FIRST for rule in provenance.rules)


def mtp_block_spec(
    layer_spec: Any,
    num_layers: int,
    *,
    config: TransformerConfig,
    backend: Backend,
    hidden_first: bool = False,
    layer: type | None = None,
    **params: Any,
) -> Any:
    """megatron-core's spec of ``num_layers`` MTP layers, each around ``layer_spec``; None for no layers.

    With ``hidden_first`` their projections multiply hidden states, then the embedding. ``layer`` is a class in place of
    megatron-core's, with ``params`` as further arguments. If the model of ``config`` has residual streams, its MTP
    layers read all of them.
    """
    if num_layers == 0:
        return None
    from megatron.core.transformer import ModuleSpec
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlockSubmodules,
        MultiTokenPredictionLayer,
        MultiTokenPredictionLayerSubmodules,
    )

    from mcore_bridge.factory.modules.streams import StreamsMtpLayer, has_streams, merging

    names = {field.name for field in dataclasses.fields(MultiTokenPredictionLayerSubmodules)}
    inner = "mtp_model_layer" if "mtp_model_layer" in names else "transformer_layer"  # 0.19 and before
    norm = norm_of(backend, config)
    projection: Any = _linear(backend)
    if hidden_first:
        from mcore_bridge.factory.modules.hidden_first import HiddenFirst

        projection = ModuleSpec(HiddenFirst, {"linear": projection})
    if has_streams(config):
        layer, params, projection = StreamsMtpLayer, {"linear": projection}, IdentityOp
    final_norm = merging(norm, config)
    others: dict[str, Any] = {"enorm": norm, "hnorm": norm, "layer_norm": final_norm, "eh_proj": projection}
    submodules = MultiTokenPredictionLayerSubmodules(**{inner: layer_spec}, **others)
    return MultiTokenPredictionBlockSubmodules(
        layer_specs=[ModuleSpec(layer or MultiTokenPredictionLayer, params, submodules)] * num_layers
    )


def _linear(backend: Backend) -> type:
    if backend == "te":
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

        return TEColumnParallelLinear
    from megatron.core.tensor_parallel import ColumnParallelLinear

    return ColumnParallelLinear


def initialise_mtp(chunk: GPTModel, seed: int) -> None:
    """Draw initial values for MTP layers, which a checkpoint may lack: identity norms, and N(0, init_method_std).

    A vector that has a ``start`` gets its value.

    Values depend on ``seed``, on the name and, for shards, on the rank. So replicas are equal.
    """
    centre = 0.0 if chunk.config.layernorm_zero_centered_gamma else 1.0
    for name, tensor in held_tensors([chunk]).items():
        if not name.startswith("mtp.") or tensor.is_meta:
            continue
        if tensor.dim() == 1:
            usual = torch.full_like(tensor, centre if name.endswith("norm.weight") else 0.0)
            tensor.detach().copy_(getattr(tensor, "start", usual))
            continue
        groups = chunk.pg_collection
        split = getattr(tensor, "tensor_model_parallel", False) or ".experts." in name
        place = (groups.expt_tp if ".experts." in name else groups.tp).rank() if split else 0
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name} {place}".encode()))
        drawn = torch.randn(tensor.shape, generator=generator) * chunk.config.init_method_std
        tensor.detach().copy_(drawn)
