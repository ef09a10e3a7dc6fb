"""Gives a zero gradient to parameters that a microbatch does not use.

megatron-core's reducers wait for the gradients of all parameters of a bucket. A tower has none in a microbatch of text,
and some towers have parameters that no feature depends on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def touched(hidden: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
    """``hidden`` itself, whose backward also gives a zero gradient to each parameter that it does not depend on."""
    unused = _unused(hidden, parameters)
    if not unused:
        return hidden
    output: Tensor = _Touched.apply(hidden, *unused)
    return output


class _Touched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = [(each.shape, each.dtype, each.device) for each in parameters]
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        zeros = (torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.parameters)
        return grad if ctx.needs_input_grad[0] else None, *zeros


def _unused(hidden: Tensor, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters that are no leaves of the graph of ``hidden``."""
    if not parameters:
        return []
    left, waiting, seen = {id(each): each for each in parameters}, [hidden.grad_fn], set()
    while waiting and left:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left.pop(id(getattr(node, "variable", None)), None)
        waiting.extend(following for following, _ in node.next_functions)
    return [*left.values()]
