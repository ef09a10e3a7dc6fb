"""What the torch backend needs for routed experts, beside megatron-core's own SequentialMLP and dispatchers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Router(TopKRouter):
    """megatron-core's router with a plain matrix product: 0.16.1's own needs TransformerEngine for it."""

    def gating(self, input: Tensor) -> Tensor:
        """``[..., hidden]`` to logits ``[..., experts]`` in ``moe_router_dtype``, or else in the dtype of the input."""
        dtype = _DTYPES.get(self.config.moe_router_dtype, input.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return torch.nn.functional.linear(input.to(dtype), self.weight.to(dtype), bias)


def adapt_experts(layer: Any) -> None:
    """Put our router into a layer's spec, if the layer has routed experts."""
    mlp = layer.mlp
    submodules: Any = mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules
    if hasattr(submodules, "router"):
        submodules.router = Router
