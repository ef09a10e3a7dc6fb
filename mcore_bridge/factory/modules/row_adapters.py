"""The adapters of a layer of which each token uses one: the adapter of the set that belongs to its row of the batch.

The products of a set read the tokens of this set alone. Between the two products, the tokens of all sets are together
again, so that ranks communicate once for all sets, whatever tokens a rank has of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mcore_bridge.batches.row_sets import TokenSets
from mcore_bridge.factory.modules.adapter import Adapter, outputs_and_input


class RowAdapters(nn.ModuleList):
    """The adapters of one layer of several sets, in the place of the adapter of one set.

    Args:
        adapters: the adapters by the name of their set. A set may have none in this layer.
        tokens: the tokens of each set.
    """

    def __init__(self, adapters: Mapping[str, nn.Module], tokens: TokenSets) -> None:
        super().__init__(adapters.values())
        self.tokens = tokens
        self.numbers = [tokens.names.index(name) for name in adapters]

    def forward(self, layer: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> Any:
        """The outputs of ``layer`` with the adapters' added. A set without tokens takes part, too.

        Otherwise its parameters would have no gradient, and ranks with and without its tokens would wait for each
        other.
        """
        (product, bias), hidden = outputs_and_input(outputs, inputs[0])
        adapters: list[Adapter] = list(self)  # type: ignore[arg-type]
        flat, linear = hidden.flatten(0, -2), nn.functional.linear
        places = self._of_layer(flat)
        inner = [
            adapter.inner(adapter.inputs_of(flat[own]), adapter.linear_in(), linear)
            for adapter, own in zip(adapters, places, strict=True)
        ]
        whole = adapters[0].across(_together(inner, places, len(flat)))
        places = self._of_layer(whole)
        beside = [
            adapter.outer(whole[own, : part.size(-1)].to(part.dtype), adapter.linear_out(), linear).to(product.dtype)
            for adapter, own, part in zip(adapters, places, inner, strict=True)
        ]
        return product.flatten(0, -2).index_add(0, torch.cat(places), torch.cat(beside)).view_as(product), bias

    def _of_layer(self, flat: Tensor) -> list[Tensor]:
        places = self.tokens.places(len(flat))
        return [places[number] for number in self.numbers]


def _together(parts: Iterable[Tensor], places: Sequence[Tensor], num_tokens: int) -> Tensor:
    """The values of the tokens of all sets, ``[tokens, widest]`` in the widest dtype, and zeros for other tokens."""
    parts = list(parts)
    width = max(part.size(-1) for part in parts)
    rows = torch.cat([nn.functional.pad(part, (0, width - part.size(-1))) for part in parts])  # cat promotes dtypes
    return rows.new_zeros(num_tokens, width).index_copy(0, torch.cat([*places]), rows)
