"""What the torch backend needs for routed experts, beside megatron-core's own SequentialMLP and dispatchers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.tensor_parallel import RowParallelLinear
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


class ExpertRowParallelLinear(RowParallelLinear):
    """The second linear layer of an expert. With a bias, megatron-core's own has two mistakes (0.16.1 to 0.19.2).

    It marks the bias as one that each TP rank saw a part of the tokens with, so that gradients are summed twice; and at
    tp=1, ep=1 it gives a view into an autograd function, to which ``MLP`` adds the bias in place: autograd raises.
    """

    def __init__(self, input_size: int, output_size: int, **arguments: Any) -> None:
        super().__init__(input_size, output_size, **arguments)
        if self.bias is not None:
            self.bias.sequence_parallel = False

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """``[tokens, inner / etp]`` to ``[tokens, hidden]`` (to be summed over ETP), and the bias, not yet added."""
        output, bias = super().forward(input_)
        return (output if bias is None else output.clone()), bias


def adapt_experts(layer: Any) -> None:
    """Put our router and linear layer into a layer's spec, if the layer has routed experts."""
    submodules = _submodules(layer.mlp)
    if not hasattr(submodules, "router"):
        return
    submodules.router = Router
    expert = _submodules(submodules.experts)
    if expert is not None:
        expert.linear_fc2 = ExpertRowParallelLinear


def _submodules(spec: Any) -> Any:
    """megatron-core 0.19 has partial functions where earlier releases have a ``ModuleSpec``."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules
