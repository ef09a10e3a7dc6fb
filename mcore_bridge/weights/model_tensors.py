"""The tensors of live models, by canonical name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import is_
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from mcore_bridge.errors import MappingError
from mcore_bridge.rules.names import canonical
from mcore_bridge.rules.trace import Shape
from mcore_bridge.weights.model_chunks import numbering_of, unwrap

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

_PLAIN = frozenset({Tensor, nn.Parameter})


def held_tensors(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Parameters and persistent buffers of this rank's chunks by canonical name, in the order of the modules.

    Raises:
        MappingError: when two chunks have equal canonical names, or a tensor's values are stored in other tensors.
    """
    held: dict[str, Tensor] = {}
    for chunk in map(unwrap, models):
        roll: _Roll | None = getattr(chunk, "bridge_roll", None)
        if roll is None or not roll.is_valid():
            roll = chunk.bridge_roll = _Roll.of(chunk)
        own = dict(zip(roll.names, roll.tensors(), strict=True))
        if twice := held.keys() & own.keys():
            raise MappingError(f"{min(twice)} is in two of the {len(models)} chunks given; pass each chunk once")
        held |= own
    if not _PLAIN.issuperset(map(type, held.values())):
        _require_own_memory(held)
    return held


def note_built(chunk: GPTModel) -> None:
    """Store on a chunk the shapes of its current tensors, all of which every save has to write."""
    held: Any = chunk
    held.bridge_built = {name: tensor.shape for name, tensor in held_tensors([chunk]).items()}


def require_as_built(models: Sequence[nn.Module], held: Mapping[str, Tensor]) -> None:
    """Raise if models lack a tensor with which they were built, or have it in another shape.

    Otherwise the file would lack a tensor on all ranks alike, which no comparison of ranks can detect.

    Args:
        held: the result of ``held_tensors`` for the models.

    Raises:
        MappingError: naming these tensors. Models that other code has built are not checked.
    """
    built: dict[str, Shape] = {}
    for chunk in map(unwrap, models):
        built |= getattr(chunk, "bridge_built", {})
    shapes = {name: tensor.shape for name, tensor in held.items()}
    if built.items() <= shapes.items():  # nearly always
        return
    wrong = [
        f"{name} had the shape {tuple(shape)}, and " + (f"has {tuple(shapes[name])}" if name in shapes else "is gone")
        for name, shape in built.items()
        if shapes.get(name) != shape
    ]
    if wrong:
        raise MappingError(
            f"the models must hold all tensors with which they were built, and {len(wrong)} tensors differ: "
            f"{'; '.join(wrong[:8])}. "
            "Build them from a config of the new shape"
        )


def _require_own_memory(held: Mapping[str, Tensor]) -> None:
    """Raise ``MappingError`` for a parameter whose data is in other tensors, such as a quantized one or one of FSDP."""
    for name, tensor in held.items():
        if type(tensor) not in _PLAIN and tensor.untyped_storage().nbytes() and not tensor.data_ptr():
            raise MappingError(
                f"{name} is a {type(tensor).__name__}, whose values are in other tensors: expected a parameter with "
                "its own memory. Build without fp8_param, and wrap without FSDP"
            )


@dataclass(frozen=True, slots=True)
class _Roll:
    """The canonical names of the tensors of a chunk, and where in the chunk they are.

    It is cached on the chunk, because every export needs it. A few comparisons check for all thousands of modules
    whether it is still valid.
    """

    names: tuple[str, ...]
    indices: tuple[int, ...]
    """The position of each named tensor among all tensors in ``holders``."""
    children: tuple[dict[str, nn.Module | None], ...]
    """The ``_modules`` of each module."""
    known: tuple[dict[str, nn.Module | None], ...]
    """Copies of ``children``."""
    holders: tuple[dict[str, Tensor | None], ...]
    """The ``_parameters`` and ``_buffers`` of each module that has any."""
    empty: tuple[dict[str, Tensor | None], ...]
    """Those without tensors."""
    seen: tuple[list[object], ...]
    """The result of ``_look`` when this was made."""

    @classmethod
    def of(cls, chunk: GPTModel) -> _Roll:
        numbering = numbering_of(chunk)
        modules = dict(chunk.named_modules())
        children = tuple(module._modules for module in modules.values())
        both = [(path, holder) for path, m in modules.items() for holder in (m._parameters, m._buffers)]
        holders = tuple(holder for _, holder in both if holder)
        paths = [f"{path}.{name}" if path else name for path, holder in both for name in holder]
        numbers = {path: number for number, path in enumerate(paths)}
        own = [name for name, _ in _tensors(chunk)]
        names = tuple(canonical(name, numbering) for name in own)
        indices = tuple(numbers[name] for name in own)
        empty = tuple(holder for _, holder in both if not holder)
        return cls(names, indices, children, tuple(map(dict, children)), holders, empty, cls._look(holders))

    @staticmethod
    def _look(holders: Sequence[dict[str, Any]]) -> tuple[list[object], ...]:
        """All names of tensors, the number of tensors that each module has, and which of them are None."""
        join = chain.from_iterable
        absent = map(is_, join(map(dict.values, holders)), repeat(None))
        return tuple([*column] for column in (join(holders), map(len, holders), absent))

    def is_valid(self) -> bool:
        """Whether the chunk still has these modules, with these names."""
        return self.children == self.known and not any(self.empty) and self._look(self.holders) == self.seen

    def tensors(self) -> Iterator[Any]:
        """The current tensors of ``names``."""
        tensors = [*chain.from_iterable(map(dict.values, self.holders))]
        return map(tensors.__getitem__, self.indices)


def _tensors(chunk: GPTModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of ``state_dict``, without its hooks and copies: parameters, then persistent buffers."""
    yield from chunk.named_parameters()
    for prefix, module in chunk.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
