"""Layers with only a mixer, attention, an MLP or experts, as in Nemotron-H; and a Mamba-2 mixer beside attention.

A mixer beside attention is built in the place of attention: both read one norm, and their outputs are added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, cat, nn

from mcore_bridge.config.layer_kinds import FIRST, SECOND
from mcore_bridge.factory.modules.backend import Backend, LayerContext, mixed, norm_of, submodules_of
from mcore_bridge.factory.modules.mixers.kda import kda_spec
from mcore_bridge.factory.modules.mixers.mamba_mixer import mamba_spec
from mcore_bridge.factory.modules.mixers.short_conv import short_conv_spec
from mcore_bridge.factory.modules.multipliers import multiplied
from mcore_bridge.factory.modules.norms import norm_mixer

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from mcore_bridge.config.tables.attention_and_mixer import SideMultipliers

_MIXERS: dict[str, Callable[[Backend], Any]] = {"M": mamba_spec, "C": short_conv_spec, "K": kda_spec}
"""The mixers in the place of attention, by their letters in ``layer_kinds``."""
_HOLDING_NORM = frozenset("MC")
"""The mixers that hold the norm before them, with backend te."""


def adapt_halves(layer: Any, context: LayerContext) -> None:
    """Puts a mixer in the place of attention, and removes the half that a layer lacks, if there are ``layer_kinds``."""
    kinds = getattr(context.config, "layer_kinds", None)
    if kinds is None:
        return
    kind = kinds[context.number]
    if {"M", "*"} <= set(kind):
        _put_mixer_beside(layer, context.config, context.backend)
    elif letter := next((letter for letter in kind if letter in _MIXERS), None):
        layer.self_attention = _MIXERS[letter](context.backend)
        norm_mixer(layer, context, holds_norm=letter in _HOLDING_NORM)
    if FIRST.isdisjoint(kind):
        remove_first(layer)
    if SECOND.isdisjoint(kind):
        remove_second(layer)


def remove_first(layer: Any) -> None:
    """Remove attention, or the mixer in its place, from the submodules of a layer, with its norm."""
    layer.self_attention, layer.self_attn_bda, layer.input_layernorm = IdentityOp, IdentityFuncOp, IdentityOp


def remove_second(layer: Any) -> None:
    """Removes the MLP, or the experts, from the submodules of a layer, with its norm."""
    layer.mlp, layer.mlp_bda, layer.pre_mlp_layernorm = IdentityOp, IdentityFuncOp, IdentityOp


def _put_mixer_beside(layer: Any, config: TransformerConfig, backend: Backend) -> None:
    """Puts a mixer beside the attention of a layer with a dense MLP, and the multipliers of its parts into it."""
    if backend == "te":  # attention and mixer share a norm, so neither module contains it
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

        layer.self_attention.submodules.linear_qkv = TEColumnParallelLinear
        layer.input_layernorm = norm_of(backend, config)
    layer.self_attention.module = mixed(WithMixer, layer.self_attention.module)
    layer.self_attention.params = {**(layer.self_attention.params or {}), "mixer": mamba_spec(backend, normed=False)}
    submodules = submodules_of(layer.mlp)
    submodules.linear_fc1 = mixed(ScaledGate, submodules.linear_fc1)
    layer.mlp_bda = multiplied(multipliers_of(config).mlp_out)


def multipliers_of(config: Any) -> SideMultipliers:
    """The multipliers of a model that has mixers beside its attention."""
    multipliers: SideMultipliers = config.side_multipliers
    return multipliers


class WithMixer(nn.Module):
    """Attention with a mixer beside it."""

    def __init__(
        self, config: Any, submodules: Any, layer_number: int, *arguments: Any, mixer: Any, **named: Any
    ) -> None:
        super().__init__(config, submodules, layer_number, *arguments, **named)
        groups = named["pg_collection"]
        self.mixer = build_module(mixer, config=config, layer_number=layer_number, pg_collection=groups)

    def forward(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        """The sum of both outputs, ``[s, b, h]``, and the bias of attention, from ``[s, b, h]``."""
        by = multipliers_of(self.config)
        own = {name: named.get(name) for name in ("inference_context", "inference_params", "packed_seq_params")}
        by_mixer, _ = self.mixer(hidden_states, **own)
        output, bias = super().forward(hidden_states * by.attention_in, *arguments, **named)
        summed = output * by.attention_out + by_mixer * by.mixer_out
        return summed, None if bias is None else bias * by.attention_out


class ScaledGate(nn.Module):
    """The first projection of an MLP, whose gate is multiplied before its activation."""

    def forward(self, hidden: Tensor, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        """``[..., gate and up]`` of this rank, and no bias, from ``[..., h]``."""
        both, bias = super().forward(hidden, *arguments, **named)
        gate, up = both.chunk(2, dim=-1)
        return cat((gate * multipliers_of(self.config).gate, up), dim=-1), bias
