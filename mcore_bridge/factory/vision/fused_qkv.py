"""Queries, keys and values of a tower in one weight, as in published files.

transformers has three layers instead. It also orders the rows of each head differently, since it rotates halves of a
head, while the published code rotates neighbours.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

_NAMES = ("q_proj", "k_proj", "v_proj")


class JoinedPart(nn.Module):
    """A layer whose weight and bias are the rows of one third of a joined layer.

    Args:
        joined: the layer with the parameters.
        index: the index of the third.
        num_heads: the number of heads, if neighbours in them are rotated; else None.
    """

    def __init__(self, joined: nn.Linear, index: int, num_heads: int | None) -> None:
        super().__init__()
        self._joined = (joined,)  # in a tuple: it is no submodule
        self._index, self._num_heads = index, num_heads

    @property
    def weight(self) -> Tensor:
        """The weight, as transformers has it."""
        return self._rows(self._joined[0].weight)

    @property
    def bias(self) -> Tensor:
        """The bias, as transformers has it."""
        return self._rows(self._joined[0].bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        return linear(hidden, self.weight, self.bias)

    def _rows(self, joined: Tensor) -> Tensor:
        rows = joined.chunk(len(_NAMES))[self._index]
        if self._num_heads is None:
            return rows
        return rows.unflatten(0, (self._num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def join_qkv(tower: nn.Module, name: str) -> None:
    """Replace the query, key and value layers of each attention by parts of one layer, named ``name``."""
    attentions: list[Any] = [module for module in tower.modules() if all(hasattr(module, part) for part in _NAMES)]
    for attention in attentions:
        size = attention.q_proj.in_features
        joined = nn.Linear(size, sum(getattr(attention, part).out_features for part in _NAMES))
        setattr(attention, name, joined)
        for index, part in enumerate(_NAMES):
            setattr(attention, part, JoinedPart(joined, index, None if part == "v_proj" else attention.num_heads))
