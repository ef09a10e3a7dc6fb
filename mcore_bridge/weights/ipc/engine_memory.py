"""Where an engine's tensors lie, found by the names of its map, and copies of HF tensors into them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from mcore_bridge.errors import TransferError
from mcore_bridge.weights.ipc.checksum import checksums
from mcore_bridge.weights.ipc.engine_copies import EngineCopies, fill
from mcore_bridge.weights.ipc.engine_tensors import Source, described, hosts, octets, plainly, tensors_named
from mcore_bridge.weights.plan.engine_map import EngineMap
from mcore_bridge.weights.transfer.copier import Buffers

Pairs = Iterable[tuple[str, Tensor]]


class EngineMemory:
    """The tensors of one rank of an engine as bytes, for a map. Addresses are looked up by ``find``, never assumed.

    Args:
        engine_map: the map, whose names are looked for.
        source: the engine's model, or a function that returns its tensors by name.
    """

    def __init__(self, engine_map: EngineMap, source: Source) -> None:
        self.map, self._source = engine_map, source
        self._found: Buffers | None = None

    @property
    def buffers(self) -> Buffers:
        """The engine's tensors in the order of the map, uint8 [bytes] each. The same object while none has moved."""
        assert self._found is not None, "find() comes first"
        return self._found

    def find(self) -> None:
        """Look for the engine's tensors by their names, and compare them with the map.

        Raises:
            TransferError: when one is missing or lies otherwise in its memory; all of them are named.
        """
        with plainly():
            self._find()

    def _find(self) -> None:
        names = [tensor.name for tensor in self.map.tensors]
        held = tensors_named(self._source, [*names, *(alias[0] for alias in self.map.aliases)])
        wrong = [*self._changed(held), *self._separated(held)]
        if wrong:
            raise TransferError(
                f"the engine is not the one that its map was made for: {'; '.join(wrong)}; make another map, and use "
                "the engine's loader until then"
            )
        addresses = [held[name].data_ptr() for name in names]
        if self._found is None or addresses != self._found.addresses.tolist():
            self._found = Buffers([octets(held[name]) for name in names])

    def _changed(self, held: dict[str, Tensor]) -> Iterator[str]:
        for tensor in self.map.tensors:
            if tensor.name not in held:
                yield f"{tensor.name} is missing"
            elif (now := described(tensor.name, held[tensor.name])) != tensor:
                yield f"{tensor.name}: expected {_geometry(tensor)}, found {_geometry(now)}"
            elif held[tensor.name].numel() and not held[tensor.name].data_ptr():
                yield f"{tensor.name} has no memory"

    def _separated(self, held: dict[str, Tensor]) -> Iterator[str]:
        inside = hosts(held)
        for name, tensor, start in self.map.aliases:
            if inside.get(name) != (tensor, start):
                yield f"{name}: expected memory of {tensor} from element {start} on, found {inside.get(name, 'other')}"
        for name in inside.keys() - {alias[0] for alias in self.map.aliases}:
            yield f"{name}: expected memory of its own, found that of {inside[name][0]}"

    def has_moved(self) -> bool:
        """Whether a tensor has another address than ``find`` saw; checked quickly, as it ends every round."""
        with plainly():
            held = tensors_named(self._source, self.map.places)
            addresses = [tensor.data_ptr() for tensor in held.values()]
        return self._found is None or addresses != self._found.addresses.tolist()

    def fill(self) -> None:
        """Write the map's constants, such as padding. They come before any copy."""
        fill(self.map.fills, dict(zip(self.map.places, self.buffers.tensors, strict=True)), self.map.dtypes)

    def copy(self, pairs: Pairs) -> Iterator[tuple[str, Tensor]]:
        """Copy HF tensors, contiguous and on the engine's device, by the map; yield those that the loader needs too."""
        self.fill()
        for name, tensor in pairs:
            entries = [(copy, 0, tensor.dtype) for copy in self.map.by_hf.get(name, ())]
            copies = EngineCopies(entries, self.map.dtypes, self.map.places)
            copies.run_once(octets(tensor), self.buffers)
            if name in self.map.by_loader:
                yield name, tensor

    def invert(self) -> None:
        """Change every bit."""
        for memory in self.buffers.tensors:
            memory.bitwise_not_()

    def sums(self) -> dict[str, int]:
        """The checksums of the tensors that the map names, as they are now."""
        held = tensors_named(self._source, self.map.places)
        return dict(zip(held, checksums(held.values()), strict=True))

    @property
    def device(self) -> torch.device:
        """Where the engine's tensors are."""
        held = tensors_named(self._source, [tensor.name for tensor in self.map.tensors[:1]])
        return next((tensor.device for tensor in held.values()), torch.device("cpu"))


def _geometry(tensor: object) -> str:
    return ", ".join(f"{field} {getattr(tensor, field)}" for field in ("shape", "strides", "dtype"))
