"""The weights that a bridge of a trainer exports: an iterator of pairs that still knows its models.

To import this file takes no megatron-core.
"""

from __future__ import annotations

from collections.abc import Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from mcore_bridge.weights.model_chunks import Models


class WeightExport(Generator[tuple[str, Tensor], None, None]):
    """The generator ``iter_hf_weights(models, ...)``. Whoever gets it may send the models by another way instead.

    Args:
        models: this rank's chunks, wrapped or not.
        merged: whether adapters are merged, as for ``iter_hf_weights``.
        device: where tensors are yielded, as for ``iter_hf_weights``.
    """

    def __init__(self, models: Models, *, merged: bool | None = None, device: str | None = None) -> None:
        from mcore_bridge.weights.export import iter_hf_weights

        self.models, self.merged = models, merged
        self._pairs: Any = iter_hf_weights(models, merged=merged, device=device)

    def send(self, value: None) -> tuple[str, Tensor]:
        """The next pair."""
        pair: tuple[str, Tensor] = self._pairs.send(value)
        return pair

    def throw(self, kind: Any, value: object = None, at: TracebackType | None = None) -> tuple[str, Tensor]:
        """Raise an error inside of the generator, which then ends."""
        pair: tuple[str, Tensor] = self._pairs.throw(kind if value is None else value)
        return pair
