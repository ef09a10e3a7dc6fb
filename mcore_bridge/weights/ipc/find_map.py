"""How an engine map is found: record the loader, probe what recording did not explain, and prove each step.

Whatever is recorded or read off is a guess until it is proven. Two sets of drawn values go through the engine's
loader. The map then has to bring back every bit of the first set over the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.ipc.checksum import checksums
from mcore_bridge.weights.ipc.engine_memory import EngineMemory
from mcore_bridge.weights.ipc.engine_proof import differing
from mcore_bridge.weights.ipc.engine_tensors import Source, all_tensors, described, hosts, tensors_named
from mcore_bridge.weights.ipc.fed_loader import Loader
from mcore_bridge.weights.ipc.pieces import Piece
from mcore_bridge.weights.ipc.probe import Numbering, drawn_values
from mcore_bridge.weights.ipc.read_off import Numbers, read_off
from mcore_bridge.weights.ipc.recorder import Recorder
from mcore_bridge.weights.plan.boxes import are_apart
from mcore_bridge.weights.plan.engine_map import EngineMap, EngineTensor, SliceCopy, SliceFill, Uncovered
from mcore_bridge.weights.transfer.copier import WORDS

_MOST_SLICES = 1 << 16
"""Slices of one tensor; what is read off as more is left to the loader."""


@dataclass
class _Tensor:
    """One of the engine's tensors, and the slices that have explained it so far."""

    described: EngineTensor
    hf: frozenset[str]
    copies: list[SliceCopy] | None = None
    """None: nothing explains the tensor yet."""
    fills: list[SliceFill] = field(default_factory=list)
    reason: str = "its loader computes it"


class Finding:
    """An engine while its map is made."""

    def __init__(self, specs: Sequence[TensorSpec], source: Source, load: Loader, engine: str) -> None:
        self._specs, self._source, self._load, self._engine = tuple(specs), source, load, engine
        self._by_name = {spec.name: spec for spec in specs}
        first = next(iter(all_tensors(source).values()), torch.empty(0))
        self._device = first.device
        self._tensors: dict[str, _Tensor] = {}
        self._aliases: dict[str, tuple[str, int]] = {}
        self.reference: dict[str, int] = {}
        """Checksums of the engine's tensors after its loader took the first drawn values."""

    def make(self) -> EngineMap:
        """Record, prove, probe what is left, and prove again."""
        self._record()
        self._give_up_unproven()
        wanting = [name for name, tensor in self._tensors.items() if tensor.copies is None]
        if wanting:
            self._probe(wanting, frozenset[str]().union(*(self._tensors[name].hf for name in wanting)))
            constant = {name for name in wanting if self._tensors[name].fills}
            wanting = self._give_up_unproven()
            if not constant.isdisjoint(wanting):  # made of HF tensors that the recorder did not see there
                self._probe(wanting, frozenset(self._by_name))
                wanting = self._give_up_unproven()
            for name in wanting:
                self._tensors[name].reason = "its loader computes it: slices that were read off give other values"
        return self._map()

    def _record(self) -> None:
        """Load drawn values, then others under the recorder. Tensors that differ depend on HF tensors.

        The first values are those of the proof: what the recorder takes for a constant has to be one for these too.
        """
        self._load(drawn_values(self._specs, 0, self._device))
        first = _sums({name: tensor for name, tensor in all_tensors(self._source).items() if not tensor.is_meta})
        recorder = Recorder()
        with recorder:
            self._load(recorder.watched(drawn_values(self._specs, 1, self._device)))
        held = all_tensors(self._source)
        inside = hosts(held)
        seen = {name: recorder.names_in(tensor) for name, tensor in held.items() if name not in inside}
        unseen = {name: held[name] for name, names in seen.items() if not (names or held[name].is_meta)}
        changed = {name for name, total in _sums(unseen).items() if total != first.get(name)}
        for name, names in seen.items():
            if held[name].is_meta:
                continue
            known = self._explained(name, held[name], recorder.traced(held[name]), names)
            if names or name in changed or known.fills:  # constants of the loader may be lost while an engine sleeps
                self._tensors[name] = known
        self._aliases = {name: place for name, place in inside.items() if place[0] in self._tensors}
        self.reference = {name: first.get(name, 0) for name in self._tensors}

    def _explained(self, name: str, tensor: Tensor, pieces: Sequence[Piece], seen: frozenset[str]) -> _Tensor:
        """A tensor with the slices that the recorder saw; without any if they do not explain all of it."""
        known = _Tensor(described(name, tensor), seen)
        span = known.described.span
        if any(piece.box.target < 0 or piece.box.target_end > span for piece in pieces):
            return known
        visible = _visible(pieces, span, tensor.device)
        if visible is None:
            return known
        pieces, num_written = visible
        known.copies = [
            SliceCopy(piece.hf, name, piece.box, self._casts(piece, tensor)) for piece in pieces if piece.hf is not None
        ]
        known.fills = [SliceFill(name, p.box, p.bits) for p in pieces if p.hf is None and p.bits is not None]
        known.described = replace(known.described, kept=tensor.numel() - num_written)
        return known

    def _casts(self, piece: Piece, tensor: Tensor) -> bool:
        return piece.casts and piece.hf is not None and self._by_name[piece.hf].dtype != tensor.dtype

    def _give_up_unproven(self) -> list[str]:
        """Copy the first drawn values by the map as it is. Forget what explained tensors that differ; their names."""
        wrong = differing(EngineMemory(self._map(), self._source), None, 0, self.reference)
        for name in wrong:
            tensor = self._tensors[name]
            tensor.copies, tensor.fills = None, []
            tensor.described = replace(tensor.described, kept=0)
        return wrong

    def _probe(self, names: Sequence[str], numbered: frozenset[str]) -> None:
        """Load numbers in place of weights, digit by digit, and read off where they went.

        Args:
            names: the engine's tensors.
            numbered: the HF tensors that are numbered; others are zero.
        """
        if not all(self._tensors[name].hf for name in names):
            numbered = frozenset(self._by_name)
        numbering = Numbering([spec for spec in self._specs if spec.name in numbered])
        numbers = {name: torch.zeros(0, dtype=torch.int64) for name in names}
        bits: dict[str, Tensor] = {}
        for place in range(numbering.num_digits):
            self._load(self._numbers(numbering, place))
            for name, tensor in tensors_named(self._source, names).items():
                flat = _in_memory_order(tensor)
                digits = numbering.digits(flat, self._source_dtype(name, tensor)).cpu()
                raw = flat.view(WORDS[tensor.element_size()]).cpu()
                if not place:
                    numbers[name], bits[name] = torch.zeros_like(digits), raw
                scaled = numbers[name] + digits * numbering.base**place
                numbers[name] = torch.where((digits < 0) | (numbers[name] < 0), -1, scaled)
                bits[name] = torch.where(bits[name] == raw, raw.to(torch.int64), _DIFFERENT)
        for name in names:
            self._read(name, numbering, numbers[name].numpy(), bits[name].numpy())

    def _numbers(self, numbering: Numbering, place: int) -> Iterator[tuple[str, Tensor]]:
        """All HF tensors, the numbered ones with their digits. Those that nothing is to be read off are zero."""
        digits = numbering.values(place, self._device)
        numbered = {spec.name for spec in numbering.specs}
        for spec in self._specs:
            if spec.name in numbered:
                yield next(digits)
            else:
                yield spec.name, torch.zeros(spec.shape, dtype=spec.dtype, device=self._device)

    def _source_dtype(self, name: str, tensor: Tensor) -> torch.dtype:
        dtypes = {self._by_name[hf].dtype for hf in self._tensors[name].hf}
        return dtypes.pop() if len(dtypes) == 1 else tensor.dtype

    def _read(self, name: str, numbering: Numbering, numbers: Numbers, bits: Numbers) -> None:
        """Turn the numbers that a tensor holds into slices, where every element is of an HF tensor or a constant."""
        known = self._tensors[name]
        places = _memory_places(known.described)
        owners = np.searchsorted(np.array(numbering.starts), numbers, side="right") - 1
        is_number = (numbers > 0) & (owners < len(numbering.specs))
        if (~is_number & (bits == _DIFFERENT)).any():
            return
        copies = []
        inside = numbers[is_number] - np.array(numbering.starts)[owners[is_number]]
        for owner, box in read_off(inside, places[is_number], owners[is_number]):
            spec = numbering.specs[owner]
            copies.append(SliceCopy(spec.name, name, box, spec.dtype != known.described.dtype))
            if len(copies) > _MOST_SLICES:
                known.reason = f"it is made of more than {_MOST_SLICES} slices"
                return
        constant = bits[~is_number] % (1 << 8 * known.described.dtype.itemsize)
        zeros = np.zeros(len(constant), np.int64)
        fills = [SliceFill(name, box, bits) for bits, box in read_off(zeros, places[~is_number], constant)]
        known.copies, known.fills = copies, fills
        known.hf |= {copy.hf for copy in copies}

    def _map(self) -> EngineMap:
        tensors = self._tensors.values()
        return EngineMap(
            self._engine,
            self._specs,
            tuple(tensor.described for tensor in tensors),
            tuple(copy for tensor in tensors for copy in tensor.copies or ()),
            tuple(entry for tensor in tensors for entry in tensor.fills),
            tuple(
                Uncovered(tensor.described.name, tensor.reason, self._in_order(tensor.hf))
                for tensor in tensors
                if tensor.copies is None
            ),
            tuple((name, host, start) for name, (host, start) in self._aliases.items()),
        )

    def _in_order(self, names: frozenset[str]) -> tuple[str, ...]:
        """HF names in the order in which they are sent; all of them if ``names`` is empty."""
        return tuple(spec.name for spec in self._specs if not names or spec.name in names)


_DIFFERENT = 1 << 62
"""Stands for bits that changed from one digit to another."""


def _visible(pieces: Sequence[Piece], span: int, device: torch.device) -> tuple[Sequence[Piece], int] | None:
    """The pieces of which something is left at the end, and how many elements they write.

    None if some are computed, or if a copy is partly overwritten.
    """
    if are_apart(piece.box for piece in pieces):
        is_explained = not any(piece.is_computed for piece in pieces)
        return (pieces, sum(piece.box.num_elements for piece in pieces)) if is_explained else None
    painted = torch.zeros(span, dtype=torch.bool, device=device)
    visible = []
    for piece in reversed(pieces):  # the last write into an element decides its value
        dims = piece.box.dims
        place = painted.as_strided([dim.size for dim in dims], [dim.target for dim in dims], piece.box.target)
        num_painted = int(place.sum())
        if num_painted == piece.box.num_elements:
            continue
        if piece.is_computed or (num_painted and piece.hf is not None):
            return None
        place.fill_(True)
        visible.append(piece)
    return visible[::-1], int(painted.sum())


def _sums(tensors: dict[str, Tensor]) -> dict[str, int]:
    return dict(zip(tensors, checksums(tensors.values()), strict=True))


def _in_memory_order(tensor: Tensor) -> Tensor:
    """The elements by their places in memory, [elements]."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: strides[dim], reverse=True)
    return tensor.detach().permute(order).reshape(-1)


def _memory_places(tensor: EngineTensor) -> Numbers:
    """The places of the elements in memory, counted from the first, in the order of ``_in_memory_order``."""
    places = np.zeros(1, np.int64)
    for size, stride in sorted([*zip(tensor.shape, tensor.strides, strict=True)], key=itemgetter(1), reverse=True):
        places = (places[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return places
