"""The algebra of layouts: invertible rearrangements between HF tensors and mcore shards.

A layout takes the *parts* of one parameter (its HF tensors) to one tensor with a leading ``tp`` axis. Its entries are
the shards that tensor-parallel ranks hold. The order of a chain replaces special cases in other code bases:
``GATED_UP`` cuts, then fuses; ``QKV`` fuses, then cuts.

Laws, for every layout ``f`` and ``g``:

* ``~~f == f`` and ``~(f >> g) == ~g >> ~f``;
* ``(~f)(f(parts)) == parts``, always and bit for bit: a layout moves elements and does no arithmetic;
* ``f((~f)(shards)) == shards`` when replicas are equal and padding is zero (``REPLICATED``, ``VOCAB`` and ``Fill`` add
  them).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from einops import rearrange, repeat
from torch import Tensor

from mcore_bridge.errors import MappingError

Parts = tuple[Tensor, ...]
Axes = Mapping[str, int]
"""Sizes that do not follow from shapes: ``tp``, ``groups``, ``heads_per_group``, ``vocab``, ``padded_vocab``, ..."""


class Layout(ABC):
    """An invertible rearrangement of a tuple of tensors."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, parts: Parts, axes: Axes) -> Parts:
        """Rearrange ``parts``; ``axes`` gives the sizes of the named axes."""

    @abstractmethod
    def __invert__(self) -> Layout:
        """The inverse layout."""

    def __rshift__(self, then: Layout) -> Layout:
        return Chain((*_steps(self), *_steps(then)))


@dataclass(frozen=True, slots=True)
class Rearrange(Layout):
    """Apply an einops pattern to every part. The inverse reads the pattern from right to left."""

    left: str
    right: str

    def __call__(self, parts: Parts, axes: Axes) -> Parts:
        names = re.findall(r"[a-z_]+", f"{self.left} {self.right}")
        sizes = {name: axes[name] for name in names if name in axes}
        return tuple(rearrange(part, f"{self.left} -> {self.right}", **sizes) for part in parts)

    def __invert__(self) -> Rearrange:
        return Rearrange(self.right, self.left)


@dataclass(frozen=True, slots=True)
class Concat(Layout):
    """Join all parts along ``dim``. ``ratio`` gives their relative sizes along it, as numbers or names of axes."""

    dim: int
    ratio: tuple[int | str, ...]

    def __call__(self, parts: Parts, axes: Axes) -> Parts:
        return (torch.cat(parts, self.dim),)

    def __invert__(self) -> Split:
        return Split(self.dim, self.ratio)


@dataclass(frozen=True, slots=True)
class Split(Layout):
    """Split a single part along ``dim`` in the given ``ratio``: the inverse of ``Concat``."""

    dim: int
    ratio: tuple[int | str, ...]

    def __call__(self, parts: Parts, axes: Axes) -> Parts:
        (whole,) = parts
        ratio = [axes[share] if isinstance(share, str) else share for share in self.ratio]
        unit, rest = divmod(whole.shape[self.dim], sum(ratio))
        if rest:
            raise MappingError(
                f"dim {self.dim} of shape {tuple(whole.shape)} cannot be split in the ratio {ratio}: "
                f"{whole.shape[self.dim]} is not a multiple of {sum(ratio)}"
            )
        return whole.split([unit * share for share in ratio], self.dim)

    def __invert__(self) -> Concat:
        return Concat(self.dim, self.ratio)


@dataclass(frozen=True, slots=True)
class Replicate(Layout):
    """Every tensor-parallel rank holds the same whole tensor."""

    def __call__(self, parts: Parts, axes: Axes) -> Parts:
        return tuple(repeat(part, "... -> tp ...", tp=axes["tp"]) for part in parts)

    def __invert__(self) -> First:
        return First()


@dataclass(frozen=True, slots=True)
class First(Layout):
    """Take the first replica: the inverse of ``Replicate``."""

    def __call__(self, parts: Parts, axes: Axes) -> Parts:
        return tuple(part[0] for part in parts)

    def __invert__(self) -> Replicate:
        return Replicate()


@dataclass(frozen=True, slots=True)
class Resize(Layout):
    """Pad dim 0 with zeros, or cut it, from size ``old`` to size ``new`` of an axis. The inverse swaps the two."""

    old: str
    new: str

    def __call__(self, parts: Parts, axes: Axes) -> Parts:
        return tuple(self._resize(part, axes) for part in parts)

    def _resize(self, part: Tensor, axes: Axes) -> Tensor:
        if part.shape[0] != axes[self.old]:
            raise MappingError(f"dim 0 of shape {tuple(part.shape)} must be the axis {self.old} = {axes[self.old]}")
        missing = axes[self.new] - axes[self.old]
        if missing <= 0:
            return part[: axes[self.new]]
        return torch.cat((part, part.new_zeros((missing, *part.shape[1:]))))

    def __invert__(self) -> Resize:
        return Resize(self.new, self.old)


@dataclass(frozen=True, slots=True)
class Fill(Layout):
    """Put zeros in place of missing parts. The given parts are at ``positions`` among all parts.

    ``ratio`` has the relative sizes along dim 0 of all parts. Each is a sum of numbers or names of axes.
    """

    ratio: tuple[tuple[int | str, ...], ...]
    positions: tuple[int, ...]

    def __call__(self, parts: Parts, axes: Axes) -> Parts:
        sizes = [sum(axes[term] if isinstance(term, str) else term for term in terms) for terms in self.ratio]
        unit, given = parts[0].shape[0] // sizes[self.positions[0]], dict(zip(self.positions, parts, strict=True))
        rest = parts[0].shape[1:]
        return tuple(given.get(i, parts[0].new_zeros((unit * size, *rest))) for i, size in enumerate(sizes))

    def __invert__(self) -> Pick:
        return Pick(self.ratio, self.positions)


@dataclass(frozen=True, slots=True)
class Pick(Layout):
    """Keep the parts at ``positions``: the inverse of ``Fill``."""

    ratio: tuple[tuple[int | str, ...], ...]
    positions: tuple[int, ...]

    def __call__(self, parts: Parts, axes: Axes) -> Parts:
        return tuple(parts[position] for position in self.positions)

    def __invert__(self) -> Fill:
        return Fill(self.ratio, self.positions)


@dataclass(frozen=True, slots=True)
class Leading(Layout):
    """Apply ``layout`` to the first ``count`` parts, which become ``becomes`` parts. Other parts do not change."""

    count: int
    becomes: int
    layout: Layout

    def __call__(self, parts: Parts, axes: Axes) -> Parts:
        return (*self.layout(parts[: self.count], axes), *parts[self.count :])

    def __invert__(self) -> Leading:
        return Leading(self.becomes, self.count, ~self.layout)


@dataclass(frozen=True, slots=True)
class Within(Layout):
    """Apply ``layout`` to one piece of a single part, at ``position`` of its pieces along ``dim`` in this ``ratio``."""

    dim: int
    ratio: tuple[int | str, ...]
    position: int
    layout: Layout

    def __call__(self, parts: Parts, axes: Axes) -> Parts:
        pieces = [*Split(self.dim, self.ratio)(parts, axes)]
        (pieces[self.position],) = self.layout((pieces[self.position],), axes)
        return Concat(self.dim, self.ratio)(tuple(pieces), axes)

    def __invert__(self) -> Within:
        return Within(self.dim, self.ratio, self.position, ~self.layout)


@dataclass(frozen=True, slots=True)
class Chain(Layout):
    """Apply layouts one after the other. The inverse applies their inverses in reverse order."""

    steps: tuple[Layout, ...]

    def __call__(self, parts: Parts, axes: Axes) -> Parts:
        for step in self.steps:
            parts = step(parts, axes)
        return parts

    def __invert__(self) -> Chain:
        return Chain(tuple(~step for step in reversed(self.steps)))


def _steps(layout: Layout) -> tuple[Layout, ...]:
    return layout.steps if isinstance(layout, Chain) else (layout,)


# fmt: off
TRANSPOSED     = Rearrange("m n", "n m")
GROUPS         = Rearrange("(groups n) ...", "groups n ...")
COLUMN         = Rearrange("(tp n) ...", "tp n ...")
ROW            = Rearrange("n (tp m)", "tp n m")
REPLICATED     = Replicate()
VOCAB          = Resize("vocab", "padded_vocab") >> COLUMN
TARGET_VOCAB   = Resize("target_vocab", "padded_target_vocab") >> COLUMN                     # of a draft head's policy
GATED_UP       = COLUMN >> Concat(1, ratio=(1, 1))                                          # cut, then fuse
QKV            = GROUPS >> Concat(1, ratio=("heads_per_group", 1, 1)) >> ~GROUPS >> COLUMN  # fuse, then cut
QKV_OF_WIDTHS  = GROUPS >> Concat(1, ratio=("query_rows", "key_rows", "value_rows")) >> ~GROUPS >> COLUMN
QK             = GROUPS >> Concat(1, ratio=("heads_per_group", 1)) >> ~GROUPS >> COLUMN     # where keys are values
FUSED_GATED_UP = Split(0, ratio=(1, 1)) >> GATED_UP                    # from one HF tensor: gate, then up
FUSED_QKV      = Split(0, ratio=("heads_per_group", 1, 1)) >> QKV      # from one HF tensor: all q, then all k, then v
ONE_ROW        = Rearrange("1 n", "n") >> REPLICATED                   # from a matrix of one row
ONE_NUMBER     = Rearrange("", "1") >> REPLICATED                      # from a tensor without dims
INTERLEAVED    = Rearrange("(tp n gate_up) ...", "tp (gate_up n) ...")  # rows of gate and up alternate in one HF tensor
# fmt: on


def upright(layout: Layout) -> Layout:
    """``layout`` for ``[out, in]``: if it begins with a transpose of HF's ``[in, out]``, without this transpose."""
    if isinstance(layout, Chain) and layout.steps[0] == TRANSPOSED:
        return Chain(layout.steps[1:])
    return layout
