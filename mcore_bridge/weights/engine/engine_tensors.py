"""The tensors of an engine by their names: parameters, buffers, and tensors in other attributes of its modules.

Addresses are not cached: tensors may have moved after the engine slept, woke or loaded again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from mcore_bridge.errors import TransferError
from mcore_bridge.rules.spec import Pair
from mcore_bridge.weights.engine.group_copies import Constants, GroupCopies, octets
from mcore_bridge.weights.plan.engine_map import EngineMap, EngineTensor
from mcore_bridge.weights.transfer.copier import Buffers

Tensors = Mapping[str, Tensor]
"""Tensors of an engine by the engine's names."""
EngineModel = nn.Module | Callable[[], Tensors]
"""An engine's model, or a function that returns the current tensors by name."""


def all_tensors(source: EngineModel) -> dict[str, Tensor]:
    """Every tensor of the engine: first its parameters and buffers, then attributes of its modules."""
    if not isinstance(source, nn.Module):
        return dict(source())
    modules = dict(source.named_modules())
    tensors = {}
    for held in ("_parameters", "_buffers", "__dict__"):
        for prefix, module in modules.items():
            for name, value in vars(module).items() if held == "__dict__" else getattr(module, held).items():
                if isinstance(value, Tensor):
                    tensors[f"{prefix}.{name}" if prefix else name] = value
    return tensors


def device_of(source: EngineModel) -> torch.device:
    """The device of the engine's first tensor; the CPU if it has none."""
    return next((tensor.device for tensor in all_tensors(source).values()), torch.device("cpu"))


class Paths:
    """Tensors of an engine by their names, which are looked up anew each time. Names share modules on their paths.

    Args:
        names: the names of the tensors.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        places = {"": 0}
        self._steps: list[tuple[int, str]] = []
        """The modules and tensors on all paths: the number of the module above each, and the name in that module."""
        self._ends = [self._place(name, places) for name in self._names]

    def _place(self, path: str, places: dict[str, int]) -> int:
        if path not in places:
            above, _, part = path.rpartition(".")
            self._steps.append((self._place(above, places), part))
            places[path] = len(places)
        return places[path]

    def tensors(self, source: EngineModel) -> dict[str, Tensor]:
        """The engine's current tensors with these names. Names that the engine lacks are left out."""
        if not isinstance(source, nn.Module):
            held = source()
            return {name: held[name] for name in self._names if name in held}
        on_paths: list[Any] = [source]
        for above, part in self._steps:
            on_paths.append(_part(on_paths[above], part))
        ends = map(on_paths.__getitem__, self._ends)
        return {name: end for name, end in zip(self._names, ends, strict=True) if isinstance(end, Tensor)}


def _part(owner: object, name: str) -> object:
    """``getattr``, without the detours of modules."""
    if isinstance(owner, nn.Module):
        for held in (owner._parameters, owner._modules, owner._buffers):
            if name in held:
                return held[name]
    return getattr(owner, name, None)


def plainly() -> AbstractContextManager[None]:
    """A context without overrides of Tensor subclasses: vLLM's subclasses slow each query down several times."""
    return torch._C.DisableTorchFunctionSubclass()


def described(name: str, tensor: Tensor) -> EngineTensor:
    """Shape, strides and dtype of ``tensor``."""
    return EngineTensor(name, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def hosts(tensors: Tensors) -> dict[str, tuple[str, int]]:
    """Tensors whose memory lies within the memory of another tensor, which is called the host.

    If two tensors have the same memory, the first is the host of the second.

    Returns:
        For each such name: the name of its host, and the position of its first element in the host.
    """
    by_storage: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel() and not tensor.is_meta:
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    inside = {}
    for names in by_storage.values():
        if len(names) == 1:
            continue
        spans = {name: _span(tensors[name]) for name in names}
        chosen: list[str] = []
        for name in sorted(names, key=lambda name: spans[name][0] - spans[name][1]):  # the largest first
            start, end = spans[name]
            item = tensors[name].element_size()
            for host in chosen:
                first, last = spans[host]
                if first <= start and end <= last and item == tensors[host].element_size():
                    inside[name] = (host, (start - first) // item)
                    break
            else:
                chosen.append(name)
    return inside


def _span(tensor: Tensor) -> tuple[int, int]:
    item = tensor.element_size()
    start = int(tensor.storage_offset()) * item
    return start, start + described("", tensor).span * item


class EngineMemory:
    """The tensors of one rank of an engine as bytes, for a map. Addresses are looked up by ``find`` in each round.

    Args:
        engine_map: the map, which has the names to look up.
        source: the engine's model, or a function that returns its tensors by name.
    """

    def __init__(self, engine_map: EngineMap, source: EngineModel) -> None:
        self.map, self._source = engine_map, source
        self._paths = Paths([*engine_map.places, *(alias[0] for alias in engine_map.aliases)])
        self._constants = Constants(engine_map)
        self._found: Buffers | None = None
        self._compared: Sequence[tuple[object, ...]] | None = None
        """Addresses and layouts that agreed with the map."""
        self._is_ahead = False

    @property
    def buffers(self) -> Buffers:
        """The engine's tensors in the order of the map, uint8 [bytes] each. Returns one object until a tensor moves."""
        assert self._found is not None, "find() comes first"
        return self._found

    def look_ahead(self) -> None:
        """Do the work of the next ``find`` now. Raises as that does."""
        self._is_ahead = False
        self.find()
        self._is_ahead = True

    def find(self) -> None:
        """Look up the engine's tensors by their names, and compare them with the map.

        Raises:
            TransferError: when a tensor is missing or has another layout in memory; the error names all of them.
        """
        is_ahead, self._is_ahead = self._is_ahead, False
        if is_ahead:
            return
        names = [*self.map.places]
        with plainly():
            held = self._paths.tensors(self._source)
            current = [(name, t.data_ptr(), t.shape, t.stride(), t.dtype) for name, t in held.items()]
            if current == self._compared:
                return
            wrong = [*self._changed(held), *self._separated(held)]
            if wrong:
                raise TransferError(
                    f"the engine is not the one that its map was made for: {'; '.join(wrong)}; make another map, and "
                    "use the engine's loader until then"
                )
            addresses = [held[name].data_ptr() for name in names]
            if self._found is None or addresses != self._found.addresses.tolist():
                self._found = Buffers([octets(held[name]) for name in names])
            self._compared = current

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
            yield f"{name}: expected separate memory, found the memory of {inside[name][0]}"

    def has_moved(self) -> bool:
        """Whether a tensor has moved since the last ``find``. The check is quick, since every round ends with it."""
        with plainly():
            addresses = [tensor.data_ptr() for tensor in self.held().values()]
        return self._found is None or addresses != self._found.addresses.tolist()

    def fill(self) -> None:
        """Write the map's constants, such as padding, before all copies."""
        self._constants.write(self.buffers)

    def copy(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        """Copy contiguous HF tensors on the engine's device by the map. Yield the tensors that the loader needs too."""
        self.fill()
        for pair in pairs:
            GroupCopies(self.map, [pair]).run([pair], self.buffers, by_kernel=False)
            if pair[0] in self.map.by_loader:
                yield pair

    def invert(self) -> None:
        """Change every bit."""
        for memory in self.buffers.tensors:
            memory.bitwise_not_()

    def held(self) -> dict[str, Tensor]:
        """The current tensors with the names of the map."""
        tensors = self._paths.tensors(self._source)
        return {name: tensors[name] for name in self.map.places if name in tensors}

    @property
    def device(self) -> torch.device:
        """The device of the engine's tensors."""
        first = Paths([tensor.name for tensor in self.map.tensors[:1]]).tensors(self._source)
        return next((tensor.device for tensor in first.values()), torch.device("cpu"))


def _geometry(tensor: object) -> str:
    return ", ".join(f"{field} {getattr(tensor, field)}" for field in ("shape", "strides", "dtype"))
