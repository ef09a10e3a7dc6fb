"""The tensors of live models, by canonical name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from mcore_bridge.errors import MappingError
from mcore_bridge.rules.adapters import FACTORS, factor_name
from mcore_bridge.rules.names import canonical_names, is_stacked
from mcore_bridge.rules.trace import Shape
from mcore_bridge.weights.model_chunks import numbering_of, unwrap
from mcore_bridge.weights.transfer.quantized_parameters import is_quantized, of_other_classes

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


_QUANTIZER = "_quantizer."
"""Part of the names of all tensors of ModelOpt's quantizers: ``weight_quantizer._amax``."""


def held_tensors(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Parameters and persistent buffers of this rank's chunks by canonical name, in the order of the modules.

    Each expert has its adapters: views of the parameters that hold them for all experts of a layer.

    Raises:
        MappingError: when two chunks have equal canonical names, or a tensor's values are stored in other tensors.
    """
    held: dict[str, Tensor] = {}
    for chunk in map(unwrap, models):
        roll: _Roll | None = getattr(chunk, "bridge_roll", None)
        current = roll.look() if roll else None
        if roll is None or current is None:
            roll = chunk.bridge_roll = _Roll.of(chunk)
            current = roll.look()
            assert current is not None
        own = dict(zip(roll.names, roll.tensors(current), strict=True))
        if twice := held.keys() & own.keys():
            raise MappingError(f"{min(twice)} is in two of the {len(models)} chunks given; pass each chunk once")
        held |= own
    _require_own_memory(of_other_classes(held))
    return held


def entries_of(stacked: Tensor) -> tuple[Tensor, ...]:
    """Views of the entries of a parameter ``[experts, ...]``, which require a gradient as the parameter does."""
    return tuple(entry.requires_grad_(stacked.requires_grad) for entry in stacked.detach().unbind())


def adapted(chunk: GPTModel) -> Iterator[tuple[list[str], Any]]:
    """Yield each adapter in use of a chunk, after the canonical names of the weights that it adapts."""
    sets: Any = getattr(chunk, "bridge_adapter_sets", None)
    if sets is None or not sets.in_use:
        return
    numbering, end = numbering_of(chunk), factor_name("", next(iter(FACTORS)))
    for path, adapter in sets.by_name[sets.in_use].modules.items():
        names = canonical_names(f"{path}{end}", numbering)
        yield [f"{name.removesuffix(end)}.weight" for name in names], adapter


def note_built(chunk: GPTModel) -> None:
    """Store on a chunk the shapes of its current tensors, all of which every save has to write."""
    held: Any = chunk
    held.bridge_built = shapes_of(held_tensors([chunk]))


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    """The shapes of tensors, by name."""
    return dict(zip(tensors, map(attrgetter("shape"), tensors.values()), strict=True))


def require_as_built(models: Sequence[nn.Module], shapes: Mapping[str, Shape]) -> None:
    """Raise if models lack a tensor with which they were built, or have it in another shape.

    Otherwise the file would lack a tensor on all ranks alike, which no comparison of ranks can detect.

    Args:
        shapes: the shapes of ``held_tensors`` of the models.

    Raises:
        MappingError: naming these tensors. Models that other code has built are not checked.
    """
    built: dict[str, Shape] = {}
    for chunk in map(unwrap, models):
        built |= getattr(chunk, "bridge_built", {})
    if shapes == built or built.items() <= shapes.items():  # nearly always
        return
    wrong = [
        f"{name} had the shape {tuple(shape)}, and " + (f"has {tuple(shapes[name])}" if name in shapes else "is gone")
        for name, shape in built.items()
        if shapes.get(name) != shape
    ]
    raise MappingError(
        f"the models must hold all tensors with which they were built, and {len(wrong)} tensors differ: "
        f"{'; '.join(wrong[:8])}. "
        "Build them from a config of the new shape"
    )


def quantizers_of(models: Sequence[nn.Module]) -> Iterator[tuple[tuple[str, ...], nn.Module, Any]]:
    """ModelOpt's quantizers that round weights in training: canonical names of the weights, module, and quantizer.

    A grouped layer of TransformerEngine holds the weights of all its experts, and has a list of quantizers for them.
    """
    for chunk in map(unwrap, models):
        numbering = numbering_of(chunk)
        for path, module in chunk.named_modules():
            quantizer: Any = getattr(module, "weight_quantizer", None)
            is_grouped = isinstance(quantizer, nn.ModuleList)
            of_weights = {f"weight{n}": own for n, own in enumerate(quantizer)} if is_grouped else {"weight": quantizer}
            for name, own in of_weights.items():
                if getattr(own, "is_enabled", False):
                    yield canonical_names(f"{path}.{name}", numbering), module, own


def ranges_of_quantizers(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The largest magnitudes for which ModelOpt's quantizers round weights in training, [] each, by canonical name.

    A quantizer has seen its weight once, and keeps this number while the weight changes.
    """
    ranges: dict[str, Tensor] = {}
    for names, _, quantizer in quantizers_of(models):
        amax = getattr(quantizer, "_amax", None)
        if amax is not None and amax.numel() == 1:
            ranges |= dict.fromkeys(names, amax.detach())
    return ranges


def _require_own_memory(held: Mapping[str, Tensor]) -> None:
    """Raise ``MappingError`` for a parameter whose data is in tensors that we do not know, such as one of FSDP."""
    for name, tensor in held.items():
        if not is_quantized(tensor) and tensor.untyped_storage().nbytes() and not tensor.data_ptr():
            raise MappingError(
                f"{name} is a {type(tensor).__name__}, whose values are in other tensors: expected a parameter with "
                "its own memory, or in TransformerEngine's FP8. Wrap without FSDP"
            )


def local_names(chunk: GPTModel) -> dict[str, str]:
    """The names of a chunk's tensors in its modules, by canonical name, in the order of the modules."""
    numbering = numbering_of(chunk)
    return {own: name for name, _ in tensors_of(chunk) for own in canonical_names(name, numbering)}


@dataclass(frozen=True, slots=True)
class _Roll:
    """The canonical names of the tensors of a chunk, and where in the chunk they are.

    It is cached on the chunk, because every export needs it. A few comparisons check for all thousands of modules
    whether it is still valid.
    """

    names: tuple[str, ...]
    indices: tuple[int, ...]
    """The position of each named tensor among all tensors in ``holders``."""
    stacked: frozenset[int]
    """Which of these positions have tensors with the adapters of all experts of a layer, and so a name for each."""
    children: tuple[dict[str, nn.Module | None], ...]
    """The ``_modules`` of each module."""
    known: tuple[dict[str, nn.Module | None], ...]
    """Copies of ``children``."""
    holders: tuple[dict[str, Tensor | None], ...]
    """The ``_parameters`` and ``_buffers`` of each module that has any."""
    empty: tuple[dict[str, Tensor | None], ...]
    """Those without tensors."""
    paths: list[str]
    """The names of all tensors in ``holders``, within their modules."""
    lengths: list[int]
    """The number of tensors in each of ``holders``."""
    classes: list[type]
    """Their classes. None has one, too."""

    @classmethod
    def of(cls, chunk: GPTModel) -> _Roll:
        numbering = numbering_of(chunk)
        modules = dict(chunk.named_modules())
        children = tuple(module._modules for module in modules.values())
        both = [(path, holder) for path, m in modules.items() for holder in (m._parameters, m._buffers)]
        holders = tuple(holder for _, holder in both if holder)
        paths = [f"{path}.{name}" if path else name for path, holder in both for name in holder]
        numbers = {path: number for number, path in enumerate(paths)}
        own = [name for name, _ in tensors_of(chunk)]
        return cls(
            names=tuple(chain.from_iterable(canonical_names(name, numbering) for name in own)),
            indices=tuple(numbers[name] for name in own),
            stacked=frozenset(numbers[name] for name in own if is_stacked(name)),
            children=children,
            known=tuple(map(dict, children)),
            holders=holders,
            empty=tuple(holder for _, holder in both if not holder),
            paths=[*chain.from_iterable(holders)],
            lengths=[*map(len, holders)],
            classes=[*map(type, chain.from_iterable(map(dict.values, holders)))],
        )

    def look(self) -> list[Any] | None:
        """All tensors of the chunk; None if its modules or names are no longer those of this roll."""
        current = [*chain.from_iterable(map(dict.values, self.holders))]
        is_valid = (
            self.children == self.known
            and not any(self.empty)
            and [*map(len, self.holders)] == self.lengths
            and [*chain.from_iterable(self.holders)] == self.paths
            and [*map(type, current)] == self.classes
        )
        return current if is_valid else None

    def tensors(self, current: list[Any]) -> Iterable[Tensor]:
        """The tensor of each name, from the result of ``look``."""
        if not self.stacked:
            return map(current.__getitem__, self.indices)
        entries = (entries_of(current[i]) if i in self.stacked else current[i : i + 1] for i in self.indices)
        return chain.from_iterable(entries)


def tensors_of(chunk: GPTModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of ``state_dict``, without its hooks and copies: parameters, then persistent buffers.

    ModelOpt's quantizers are left out: they round weights in training, and hold statistics.
    """
    return ((name, tensor) for name, tensor in _all_tensors_of(chunk) if _QUANTIZER not in name)


def _all_tensors_of(chunk: GPTModel) -> Iterator[tuple[str, Tensor]]:
    yield from chunk.named_parameters()
    for prefix, module in chunk.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
