"""Residuals with a multiplier: the outputs of attention and MLP are multiplied before they are added, as in Granite."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from mcore_bridge.factory.modules.backend import submodules_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatron.core.transformer import TransformerConfig

    Add = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


def adapt_residuals(layer: Any, config: TransformerConfig) -> None:
    """Replaces the additions of residuals in a layer by ``multiplied``, if the config has a multiplier.

    Args:
        layer: the submodules of a layer, changed in place.
        config: its ``residual_multiplier`` is for attention and MLP, its ``expert_multiplier`` only for experts.
    """
    multiplier, of_experts = (getattr(config, f"{name}_multiplier", None) for name in ("residual", "expert"))
    if multiplier is not None:
        layer.self_attn_bda = layer.mlp_bda = multiplied(multiplier)
    if of_experts is not None and hasattr(submodules_of(layer.mlp), "router"):
        layer.mlp_bda = multiplied(of_experts)


@functools.cache
def multiplied(multiplier: float) -> Callable[[bool, bool], Add]:
    """megatron-core's ``get_bias_dropout_add``, with a multiplier and without a fused kernel."""

    def get_bias_dropout_add(training: bool, fused: bool) -> Add:
        def add(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, probability: float) -> Tensor:
            output, bias = output_with_bias
            output = output if bias is None else output + bias
            return residual + nn.functional.dropout(output * multiplier, probability, training)

        return add

    return get_bias_dropout_add
