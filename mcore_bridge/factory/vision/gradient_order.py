"""Gives each parameter of a tower one gradient in each microbatch, in a fixed order.

megatron-core's reducers start a collective as soon as all parameters of a bucket have a gradient. All replicas must
start equal collectives in one order. But in a microbatch one replica may have images and another only text, and some
towers have parameters that no feature depends on. So the tower computes with aliases of its parameters. A chain of
nodes in autograd's graph passes the gradients of the aliases on to the parameters, one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class OrderedGradients:
    """The aliases of a tower's parameters in one microbatch.

    Attributes:
        aliases: by the names of the parameters that are trained now.
        token: the end of the chain; None if there are no aliases.
    """

    aliases: Mapping[str, Tensor]
    token: Tensor | None

    def joined(self, hidden: Tensor) -> Tensor:
        """Return ``hidden``, whose backward then also starts the chain."""
        if self.token is None:
            return hidden
        output: Tensor = _Join.apply(hidden, self.token)
        return output


def ordered_gradients(tower: nn.Module) -> OrderedGradients:
    """Make aliases. The gradients of the last parameters come first, as in megatron-core's buckets.

    Call this before any other computation of the microbatch: autograd runs later nodes first.
    """
    trained = {name: weight for name, weight in tower.named_parameters() if weight.requires_grad}
    if not trained or not torch.is_grad_enabled():
        return OrderedGradients({}, None)
    aliases: dict[str, Tensor] = {}
    token = next(iter(trained.values())).new_zeros(())
    for name, parameter in trained.items():
        token, aliases[name] = _Link.apply(token, parameter)
    return OrderedGradients(aliases, token)


def gather_parameters(tower: nn.Module) -> None:
    """Make megatron-core's DDP gather the parameters of a tower, if it usually does so in the forward.

    DDP gathers the parameters of a module when the module runs. But a microbatch of text does not run the tower, so
    replicas would gather in different orders. Also, some modules read a parameter of a module that does not run.
    """
    for module in tower.modules():
        for hook in tuple(module._forward_pre_hooks.values()):
            if getattr(hook, "__qualname__", "").startswith("DistributedDataParallel."):
                hook(module)


class _Link(torch.autograd.Function):
    """Its backward waits for the gradient of the alias, and for the next links."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, parameter: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.parameter = parameter.shape, parameter.dtype, parameter.device
        return token.clone(), parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, token: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, Tensor]:
        if grad is None:
            shape, dtype, device = ctx.parameter
            grad = torch.zeros((), dtype=dtype, device=device).expand(shape)
        return token, grad


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, token: Tensor) -> Tensor:
        ctx.token = token.dtype, token.device
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor]:
        dtype, device = ctx.token
        return grad if ctx.needs_input_grad[0] else None, torch.zeros((), dtype=dtype, device=device)
