"""Products of tokens in groups, each with a weight of its own: experts, or sets of adapters, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

_ALIGNED = 8
"""All sizes in a grouped product of bf16 must be multiples of this."""


@dataclass(frozen=True)
class Groups:
    """Consecutive tokens in groups.

    Attributes:
        counts: how many tokens each group has.
    """

    counts: list[int]
    _ends: dict[torch.device, Tensor] = field(default_factory=dict)

    def ends(self, device: torch.device) -> Tensor:
        """The number of tokens up to the end of each group, int32 ``[groups]``. It is copied to a device once."""
        if device not in self._ends:
            self._ends[device] = torch.tensor(self.counts, device=device).cumsum(0, dtype=torch.int32)
        return self._ends[device]

    def product(self, hidden: Tensor, weights: Tensor) -> Tensor:
        """Each token of ``[tokens, in]`` times the weight of its group, of ``[groups, out, in]``."""
        return product_of_groups(hidden, [weights], self)[:, : weights.size(1)]


@dataclass(frozen=True)
class SortedTokens:
    """The tokens of a layer that belong to a group, sorted by group.

    Attributes:
        places: the places of these tokens among all tokens of the layer, int64 ``[sorted tokens]``.
        groups: how many tokens each group has.
    """

    places: Tensor
    groups: Groups


def sort_tokens(numbers: Tensor, num_groups: int) -> SortedTokens:
    """Sort tokens by the number of their group, int64 ``[tokens]``; -1 for tokens without a group."""
    none, *counts = torch.bincount(numbers + 1, minlength=num_groups + 1).tolist()
    return SortedTokens(numbers.argsort(stable=True)[none:], Groups(counts))


def product_of_groups(hidden: Tensor, stacks: Sequence[Tensor], groups: Groups) -> Tensor:
    """Each token times the weight of its group: one product if torch has a kernel for it, or else one for each group.

    Args:
        hidden: ``[tokens, in]``, sorted by group.
        stacks: the weights of all groups, in order. Each stack is ``[groups, out, in]``. Stacks may differ in ``out``,
            and in ``in``; a narrow weight reads the first features.

    Returns:
        ``[tokens, widest out]``, or some columns more. Columns beyond the ``out`` of a group are zero.
    """
    out, width = max(stack.size(1) for stack in stacks), hidden.size(1)
    is_alike = all(stack.dtype == hidden.dtype for stack in stacks)
    if len(groups.counts) > 1 and has_grouped_kernel(hidden) and is_alike and len(hidden) and width % _ALIGNED == 0:
        out += -out % _ALIGNED
        alike = [padded(padded(stack, 2, width), 1, out) for stack in stacks]
        weights = torch.cat(alike) if len(alike) > 1 else alike[0]
        return nn.functional.grouped_mm(hidden, weights.mT, offs=groups.ends(hidden.device))
    pairs = zip(hidden.split(groups.counts), (weight for stack in stacks for weight in stack), strict=True)
    outs = [nn.functional.linear(own[:, : weight.size(1)].to(weight.dtype), weight) for own, weight in pairs]
    return torch.cat([padded(own, 1, out) for own in outs])  # cat promotes dtypes


def has_grouped_kernel(hidden: Tensor) -> bool:
    """Whether torch has one kernel for all groups. Without, ``grouped_mm`` is a loop that first waits for the GPU."""
    is_there = hasattr(nn.functional, "grouped_mm") and hidden.is_cuda and hidden.dtype == torch.bfloat16
    return is_there and torch.cuda.get_device_capability(hidden.device)[0] in (9, 10)


def padded(tensor: Tensor, dim: int, size: int) -> Tensor:
    """``tensor`` with zeros at the end of ``dim``, up to ``size``."""
    absent = size - tensor.size(dim)
    return nn.functional.pad(tensor, (0, 0) * (tensor.dim() - 1 - dim) + (0, absent)) if absent else tensor
