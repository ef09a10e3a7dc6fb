"""Layers of one half: a mixer or attention without an MLP, or an MLP or experts alone, as in Nemotron-H."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp

from mcore_bridge.config.tables.derived_hybrid import FIRST, SECOND

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from mcore_bridge.factory.modules.backend import Backend


def adapt_halves(layer: Any, config: TransformerConfig, number: int, backend: Backend) -> None:
    """Puts a mixer in the place of attention, and removes the half that layer ``number`` (from 0) does not have.

    Args:
        layer: the submodules of the layer, changed in place.
        config: its ``layer_kinds`` has the kind of each layer; without it, layers stay unchanged.
        number: the number of the layer in the whole model.
        backend: the backend of the layer's modules.
    """
    kinds = getattr(config, "layer_kinds", None)
    if kinds is None:
        return
    if {"M", "*"} <= set(kinds[number]):
        from mcore_bridge.factory.modules.attention_and_mixer import adapt_beside

        adapt_beside(layer, config, backend)
    elif "M" in kinds[number]:
        from mcore_bridge.factory.modules.mamba.mamba_mixer import mamba_spec

        layer.self_attention = mamba_spec(backend)
    if FIRST.isdisjoint(kinds[number]):
        remove_first(layer)
    if SECOND.isdisjoint(kinds[number]):
        remove_second(layer)


def remove_first(layer: Any) -> None:
    """Remove attention, or the mixer in its place, from the submodules of a layer, with its norm."""
    layer.self_attention, layer.self_attn_bda, layer.input_layernorm = IdentityOp, IdentityFuncOp, IdentityOp


def remove_second(layer: Any) -> None:
    """Removes the MLP, or the experts, from the submodules of a layer, with its norm."""
    layer.mlp, layer.mlp_bda, layer.pre_mlp_layernorm = IdentityOp, IdentityFuncOp, IdentityOp
