"""Limits: of queries, keys and values, and of gates in MLPs and experts, which may differ between layers.

megatron-core clamps gates before their activation, by one limit for all layers (``activation_func_clamp_value``). Here
the limit of gates is behind SiLU, unless ``limits_before_activation`` is set. SiLU grows wherever it is positive, so it
exceeds a limit exactly where its input exceeds the input at this limit. So the outputs of ``linear_fc1`` are clamped,
and any kernel may compute the activation from them.
"""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from mcore_bridge.factory.modules.backend import ChangesOutput, LayerContext, submodules_of


def adapt_limits(layer: Any, context: LayerContext) -> None:
    """Limits the gates of a layer, if its config has a limit for them.

    ``glu_limit`` is for its MLP or shared experts, ``expert_glu_limit`` for its routed experts. With
    ``limits_before_activation``, they are limits of the inputs of SiLU.
    """
    config, mlp = context.config, submodules_of(layer.mlp)
    is_sparse = hasattr(mlp, "router")
    for attribute, spec in (
        ("glu_limit", mlp.shared_experts if is_sparse else layer.mlp),
        ("expert_glu_limit", mlp.experts if is_sparse else None),
    ):
        limit = getattr(config, attribute, None)
        if limit is not None and spec is not None:
            submodules, before = submodules_of(spec), getattr(config, "limits_before_activation", False)
            submodules.linear_fc1 = limited(submodules.linear_fc1, limit, limit if before else silu_inverse(limit))


def adapt_clip(layer: Any, context: LayerContext) -> None:
    """Clips queries, keys and values of a layer before their rope, if its config has a ``qkv_clip``."""
    bound = getattr(context.config, "qkv_clip", None)
    if bound is None:
        return
    attention = layer.self_attention.submodules
    attention.linear_qkv = clipped(attention.linear_qkv, bound)


def silu_inverse(limit: float) -> float:
    """The input, above 0, for which SiLU is ``limit``.

    >>> round(silu_inverse(7.0), 4)
    7.0064
    """
    value = limit
    for _ in range(64):  # each step makes the error smaller by a factor of e, at least
        value = limit * (1 + math.exp(-value))
    return value


@functools.cache
def limited(linear: type, limit: float, gate_limit: float) -> type:
    """A subclass of ``linear``, whose outputs are gates and the values that they multiply, with these limits."""
    limits = {"limit": limit, "gate_limit": gate_limit}
    return type(f"Limited{linear.__name__}", (Limited, linear), {**limits, "__doc__": Limited.__doc__})


class Limited(ChangesOutput):
    """A linear layer with clamped outputs, after an adapter: gates, and the values that they multiply."""

    limit: ClassVar[float]
    gate_limit: ClassVar[float]

    def __init__(self, *sizes: int, **arguments: Any) -> None:
        super().__init__(*sizes, **arguments)
        self.register_forward_hook(_clamp)  # an adapter's hook runs before this hook


def _clamp(module: Any, inputs: object, outputs: tuple[Tensor, None]) -> tuple[Tensor, None]:
    """Clamp ``[..., 2 * n]``: n gates, then n values. No family with limits has a bias there."""
    gates, values = outputs[0].chunk(2, -1)
    return torch.cat((gates.clamp(max=module.gate_limit), values.clamp(-module.limit, module.limit)), -1), outputs[1]


@functools.cache
def clipped(linear: type, bound: float) -> type:
    """A subclass of ``linear``, whose outputs are at most ``bound`` and at least its negative."""
    return type(f"Clipped{linear.__name__}", (Clipped, linear), {"bound": bound, "__doc__": Clipped.__doc__})


class Clipped(ChangesOutput):
    """A linear layer with clipped outputs, after an adapter and after its bias."""

    bound: ClassVar[float]

    def __init__(self, *sizes: int, **arguments: Any) -> None:
        super().__init__(*sizes, **arguments)
        self.register_forward_hook(_clip)


def _clip(module: Any, inputs: object, outputs: tuple[Tensor, None]) -> tuple[Tensor, None]:
    return outputs[0].clamp(-module.bound, module.bound), outputs[1]
