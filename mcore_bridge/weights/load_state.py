"""The state of a load on one rank: which HF tensors go into which parameters, and which have arrived."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from mcore_bridge.arguments import FormerName
from mcore_bridge.errors import CheckpointError, plural
from mcore_bridge.rules.dtypes import Dtypes, dtype_name, has_overflown, is_exact, wanted_dtype, warn_of_overflow
from mcore_bridge.rules.encoded import Encoded, EncodedSlice, Weight
from mcore_bridge.rules.mapping import unstacked
from mcore_bridge.rules.names import expert_of, foreign_prefix, kind_of, mtp_layer_of
from mcore_bridge.rules.scheme import Encoding
from mcore_bridge.rules.trace import Copy, Shape
from mcore_bridge.weights.bound import BoundModel
from mcore_bridge.weights.files.encoded_copy import EncodedCopy
from mcore_bridge.weights.files.safetensors import SafetensorsFile
from mcore_bridge.weights.files.slice_reader import AnyCopy, FileCopy
from mcore_bridge.weights.source.tied_tensors import differing
from mcore_bridge.weights.transfer.quantized_parameters import Targets, format_of

_SCORES = {"score.weight": "classification", "score.0.weight": "process_reward"}
"""The ``head`` of ``build_model`` for each weight that only a classifier has."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of a load on this rank.

    Attributes:
        num_tensors: HF tensors from which this rank has read.
        num_bytes: bytes that it copied from them, or compared.
        initialised: HF names that the source lacks and that keep their random values: a new head, or MTP layers.
        ignored: HF names in the source that the model does not use, and copies of a used tensor under other names.
        not_built: names in ``ignored`` of parts that are not built: MTP layers, or the tower of a composite. If the
            source is the folder of the model, a save copies them unchanged.
        cast: HF names whose dtype was changed, with the change as ``"float32 -> bfloat16"``. For decoded tensors:
            ``"float8_e4m3fn[128x128] -> bfloat16"``, with the shape of the block of each scale.
        missing: HF names that the source lacks, an error without ``strict=False``.
        unexpected: HF names in the source that no parameter has, an error without ``strict=False``.

    Example:
        >>> mb.load_hf_weights(models, "path/of/Qwen3-8B").ignored
        ()
    """

    num_tensors: int
    num_bytes: int
    initialised: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    not_built: tuple[str, ...] = ()
    cast: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    carried = FormerName("not_built")


@dataclass(frozen=True, slots=True)
class _Use:
    """The use of one HF tensor in one parameter of this rank."""

    mcore: str
    tensor: Tensor
    shape: Shape
    copies: tuple[Copy, ...]
    padding: tuple[tuple[int, int, int], ...]
    index: int | None
    """The index along dim 0 of the part (of shape ``shape``) that is used. None means the whole tensor."""

    def part(self, copy: Copy, hf_tensor: Tensor) -> Tensor:
        """The part of an HF tensor, or of its coordinates, that one copy reads."""
        return copy.of_part(hf_tensor if self.index is None else hf_tensor[self.index])


class Load:
    """The state of one load: the parameters of each HF tensor, and the HF tensors that have arrived."""

    def __init__(self, bound: BoundModel, dtype: Dtypes) -> None:
        self.bound = bound
        self.dtype = dtype
        self.uses: dict[str, list[_Use]] = {}
        self.seen: dict[str, None] = {}
        self.first: dict[str, str] = {}
        """The first name under which each HF tensor arrived, by its main name."""
        self._cuts: dict[object, EncodedSlice] = {}
        self._targets = Targets(bound.tensors)
        self._parts: dict[str, set[str]] = {}
        """The HF tensors of each quantized tensor."""
        self.cast: dict[str, str] = {}
        self.num_bytes = 0
        self._names = LoadReport(0, 0)
        """The result of ``check_names``."""
        if problem := bound.problem_of(dtype):
            raise CheckpointError(problem)
        for mcore in bound.tensors:
            self._use(mcore)

    @property
    def device(self) -> torch.device:
        """The device of the tensors that are loaded; a stage may have no tensors."""
        return next((tensor.device for tensor in self.bound.tensors.values()), torch.device("cpu"))

    def _use(self, mcore: str) -> None:
        tensor = self.bound.tensors[mcore]
        if tensor.is_meta:
            raise CheckpointError(f"{mcore} is on the meta device and has no storage; build or move the model first")
        binding = self.bound.mapping.bind(mcore)
        trace = self.bound.trace(binding)
        rank = self.bound.ranks[binding.axis]
        mine = [copy for copy in trace.to_mcore if copy.shard == rank]
        for part, (name, shape) in enumerate(zip(binding.hf, trace.part_shapes, strict=True)):
            copies = tuple(copy for copy in mine if copy.part == part)
            padding = trace.padding(rank) if part == 0 else ()
            whole, index = unstacked(name)
            if mcore in self._targets.quantized:
                self._parts.setdefault(mcore, set()).add(whole)
            self.uses.setdefault(whole, []).append(_Use(mcore, tensor, shape, copies, padding, index))

    def check_names(self, names: Iterable[str], unused: Iterable[str], strict: bool) -> None:
        """Check that this rank misses no tensor, and that some rank uses each tensor of the source.

        Args:
            names: the names of the source's tensors.
            unused: the names of further tensors that no weight needs, such as scales of activations.
        """
        names = dict.fromkeys(names)
        present = {mtp_layer_of(use.mcore) for name in names if name in self.uses for use in self.uses[name]}
        absent = [name for name in self.uses if name not in names]
        initialised = tuple(name for name in absent if self._is_initialised(name, present))
        missing = tuple(name for name in absent if name not in initialised)
        others = self._not_elsewhere(name for name in names if name not in self.uses)
        mapping = self.bound.mapping
        ignored = tuple(filter(mapping.is_unused, others))
        not_built = tuple(filter(mapping.is_not_built, ignored))
        unexpected = tuple(name for name in others if not mapping.is_unused(name))
        self._names = LoadReport(0, 0, initialised, (*ignored, *unused), not_built, {}, missing, unexpected)
        if strict and (missing or unexpected):
            advice = "Use the checkpoint of this config" + foreign_prefix(unexpected, missing)
            if head := next((_SCORES[name] for name in unexpected if name in _SCORES), None):
                advice = f'Build the model with head="{head}", the head that the source has'
            elif any(use.mcore.startswith("output_layer.") for name in missing for use in self.uses[name]):
                advice += '. Build a checkpoint without a head, such as an embedding model, with head="none"'
            raise CheckpointError(
                f"the source does not fit the model: {plural(len(missing), 'tensor')} missing {[*missing[:8]]}, "
                f"{len(unexpected)} unexpected {[*unexpected[:8]]}. {advice}",
                in_python="load_hf_weights(strict=False) reports them instead",
            )

    def _not_elsewhere(self, names: Iterable[str]) -> list[str]:
        """The names that no other rank uses. If another rank uses the last expert of a layer, all are used."""
        kinds: dict[str, list[str]] = {}
        for name in names:
            kinds.setdefault(kind_of(name), []).append(name)
        last_of = (max(kind, key=lambda name: expert_of(name) or 0) for kind in kinds.values())
        unclear = [kind for kind, last in zip(kinds.values(), last_of, strict=True) if not self._is_elsewhere(last)]
        return [name for kind in unclear for name in kind if not self._is_elsewhere(name)]

    def _is_elsewhere(self, name: str) -> bool:
        return any(map(self.bound.is_elsewhere, self.bound.mapping.consumers(name)))

    def _is_initialised(self, name: str, present: set[int | None]) -> bool:
        """Whether a source may lack a tensor: of a new head, or of an MTP layer of which it has no tensor."""
        layers = {mtp_layer_of(use.mcore) for use in self.uses[name]}
        return self.bound.mapping.is_optional(name) or (None not in layers and layers.isdisjoint(present))

    def check(self, name: str, tensor: Weight | Encoding) -> None:
        """Compare kind, shape and dtype of an HF tensor with every parameter that it goes to.

        The dtype of an encoded tensor is not compared: it is decoded to the dtype of each parameter.
        """
        is_dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_meta
        if not is_dense and not isinstance(tensor, Encoded | Encoding):
            kind = f"{tensor.layout} on {tensor.device}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise CheckpointError(
                f"{name} must be a dense torch.Tensor that holds its values, found {kind}: convert it"
            )
        for use in self._uses_of(name):
            shape = use.shape if use.index is None else (self.bound.axes["experts"], *use.shape)
            if tuple(tensor.shape) != shape:
                advice = "load the checkpoint of this config"
                if use.mcore.startswith("output_layer.") and self.bound.mapping.is_optional(name):
                    advice = "build with the head= of this checkpoint, or leave its head out for a new one"
                raise CheckpointError(
                    f"{name} has shape {tuple(tensor.shape)}, but {use.mcore} of shape {tuple(use.tensor.shape)} at "
                    f"tp={self.bound.axes['tp']} takes {shape}; {advice}" + self._cut_equally(use.mcore, tensor.shape)
                )
            if not isinstance(tensor, Tensor):
                self.cast.setdefault(name, f"{tensor.codec} -> {format_of(use.tensor)}")
                continue
            crossing = self._crossing(name, tensor.dtype, use)
            if not is_exact(crossing, use.tensor.dtype):
                held = dtype_name(use.tensor.dtype)
                raise CheckpointError(
                    f"{name} is {dtype_name(crossing)} and {use.mcore} {held}, which cannot hold all its values; pass "
                    f"dtype=torch.{held} to cast, or build the model in another dtype"
                )
            if (new := format_of(use.tensor)) != (old := dtype_name(tensor.dtype)):
                self.cast.setdefault(name, f"{old} -> {new}")

    def _cut_equally(self, mcore: str, shape: Sequence[int]) -> str:
        """Advice on a tensor of ``shape``, if it is one of equal parts of a parameter whose parts differ in size."""
        parts = {name: use.shape for name, uses in self.uses.items() for use in uses if use.mcore == mcore}
        rows = [own[0] for own in parts.values() if own]
        if len({*rows}) < 2 or not shape or abs(shape[0] * len(rows) - sum(rows)) >= len(rows):
            return ""
        return (
            f". If transformers saved it, it cut {', '.join(parts)} into equal parts: join them, and cut them again, "
            f"into {rows} rows"
        )

    def write(self, name: str, tensor: Weight) -> None:
        """Copy this rank's slices of one HF tensor. If they have already come under another name, compare instead."""
        original = self.bound.mapping.original(name)
        first = self.first.setdefault(original, name)
        for slice_copy in self.slices(name, tensor):
            if first == name:
                slice_copy.run()
            elif not slice_copy.is_in_place():
                raise differing(self.bound.mapping, [(name, first) if name != original else (first, name)])
        self.settle()

    def num_buffered(self, name: str) -> int:
        """How many bytes of buffers an HF tensor needs until ``settle``, beside the parameters."""
        return self._targets.num_buffered(use.mcore for use in self._uses_of(name))

    def settle(self) -> None:
        """Quantize the parameters in FP8 of which all HF tensors have come."""
        self._targets.settle(lambda mcore: self._parts[mcore] <= self.seen.keys())

    def close(self) -> None:
        """Quantize all that is left, also parameters of which the source lacks a part."""
        self._targets.close()

    def slices(self, name: str, tensor: Weight, files: tuple[SafetensorsFile, ...] = ()) -> Iterator[AnyCopy]:
        """Set padding to zero, and yield the copies of one HF tensor, which has been checked.

        Args:
            files: the files of the tensor, or of its parts.
        """
        if name in self.seen:
            raise CheckpointError(f"{name} came twice; every HF tensor must come exactly once")
        self.seen[name] = None
        for use in self._uses_of(name):
            held = self._targets[use.mcore]
            for dim, start, size in use.padding:
                held.narrow(dim, start, size).zero_()
            for copy in use.copies:
                target = copy.of_shard(held)
                if isinstance(tensor, Encoded):
                    encoded = self._cut(tensor, use, copy)
                    self.num_bytes += encoded.nbytes
                    self._targets.note_source(use.mcore, encoded)
                    yield EncodedCopy.of(encoded, target, files)
                    continue
                source = use.part(copy, tensor)
                self.num_bytes += source.nbytes
                yield FileCopy(source, target, self._crossing(name, tensor.dtype, use), files)

    def _cut(self, weight: Encoded, use: _Use, copy: Copy) -> EncodedSlice:
        """The slice of an encoded weight that one copy uses. Equal copies of weights of one shape have equal slices."""
        key = (copy, use.index, weight.shape, weight.order)
        if key not in self._cuts:
            self._cuts[key] = weight.cut(partial(use.part, copy))
        return self._cuts[key].of(weight)

    def _uses_of(self, name: str) -> list[_Use]:
        """The uses of a tensor; for a copy, the uses of its original."""
        return self.uses.get(self.bound.mapping.original(name), [])

    def _crossing(self, name: str, own: torch.dtype, use: _Use) -> torch.dtype:
        """The dtype before the copy: the stored dtype if the parameter holds all its values, as for a router's bias."""
        return own if is_exact(own, use.tensor.dtype) else wanted_dtype(name, own, self.dtype)

    def report(self) -> LoadReport:
        """The report of a finished load. It warns of infinite numbers that casts have made."""
        held = {use.mcore: use.tensor for name in self.cast for use in self._uses_of(name)}
        warn_of_overflow([name for name, tensor in held.items() if has_overflown(tensor)])
        read = tuple(name for name in self.uses if name in self.first or name in self.seen)
        return replace(self._names, num_tensors=len(read), num_bytes=self.num_bytes, cast=self.cast)
