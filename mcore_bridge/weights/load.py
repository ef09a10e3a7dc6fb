"""HF to mcore: every rank copies the slices that it owns straight into its parameters, without communication.

Each element of each parameter is written exactly once, and each HF tensor of this rank is read once. All else in a
source must belong to another pipeline stage, or be on the architecture's list of ignored names.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mcore_bridge.config.hf import find_folder
from mcore_bridge.config.quantization import read_quantization
from mcore_bridge.errors import CheckpointError
from mcore_bridge.rules.encoded import Encoded, EncodedSlice
from mcore_bridge.rules.mapping import Dialect, unstacked
from mcore_bridge.rules.names import expert_of, kind_of, mtp_layer_of
from mcore_bridge.rules.scheme import Held
from mcore_bridge.rules.trace import Copy, Shape
from mcore_bridge.weights.base_names import with_prefix
from mcore_bridge.weights.bound import BoundModel, Models, bind, chunks_of, provenance_on
from mcore_bridge.weights.dtypes import Dtypes, dtype_name, is_exact, wanted_dtype
from mcore_bridge.weights.files.decoded import (
    Decoded,
    DecodedCheckpoint,
    DecodedPairs,
    Stored,
    decoded_mapping,
    opened_folder,
    unused_in,
)
from mcore_bridge.weights.files.encoded_copy import EncodedCopy
from mcore_bridge.weights.files.hf_folder import Checkpoint
from mcore_bridge.weights.files.safetensors import SafetensorsFile
from mcore_bridge.weights.files.slice_reader import AnyCopy, SliceCopy, read
from mcore_bridge.weights.files.staging import SLOT_BYTES, Staging
from mcore_bridge.weights.gc_paused import uncollected
from mcore_bridge.weights.orientation import turned
from mcore_bridge.weights.provenance import HF, Provenance, dialect_of
from mcore_bridge.weights.ties import differing, renamed, require_equal
from mcore_bridge.weights.transfer.copier import compiling

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

Source = str | os.PathLike[str] | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of a load on this rank.

    Attributes:
        num_tensors: HF tensors from which this rank has read.
        num_bytes: bytes that it copied from them, or compared with what it had copied.
        initialised: HF names that the source lacks and that keep their random values: a new head, or MTP layers.
        ignored: HF names in the source that the architecture does not use, and further names of a used tensor.
        cast: HF names whose dtype was changed, with the change as ``"float32 -> bfloat16"``. Decoded tensors have
            ``"float8_e4m3fn[128x128] -> bfloat16"``, with the block that shares a scale.
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
    cast: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Use:
    """The use of one HF tensor in one parameter of this rank."""

    mcore: str
    tensor: Tensor
    shape: Shape
    copies: tuple[Copy, ...]
    padding: tuple[tuple[int, int, int], ...]
    index: int | None
    """The index along dim 0 of the HF tensor that is used, of shape ``shape``; None uses the whole tensor."""

    def of(self, hf_tensor: Tensor) -> Tensor:
        """The part of the HF tensor that goes into the parameter."""
        return hf_tensor if self.index is None else hf_tensor[self.index]


@torch.no_grad()
def load_hf_weights(
    models: Models,
    source: Source,
    *,
    hf: HF | None = None,
    head: str = "lm",
    dtype: Dtypes = None,
    dialect: Dialect | None = None,
    strict: bool = True,
    slot_bytes: int = SLOT_BYTES,
) -> LoadReport:
    """Copy HF weights into this rank's chunks, in place.

    Args:
        models: this rank's chunks, wrapped or not, on any device.
        source: a folder of safetensors, with or without index (or its hub name in the local cache), a mapping of HF
            names to tensors, or an iterable of pairs. Every rank needs a source, as nothing communicates. Folders and
            mappings are checked before the first write. Weights may be encoded (docs/guide/quantized.md): each slice is
            decoded on the device of its parameter, into its dtype. In an iterable, codes wait for their scales.
        hf, head: for models that ``build_model`` did not make: their HF config or folder, and their head.
        dtype: cast tensors to this first, where a parameter cannot hold every value of its source. By default such a
            parameter is an error.
        dialect: how the source holds routed experts: "split" or "fused". By default the names of a folder or mapping
            decide; for an iterable, it is that of the checkpoint that the models come from.
        strict: whether missing and unexpected tensors raise; otherwise they are reported.
        slot_bytes: bytes that are read from a file at once. Host memory holds some twelve times that, if slices cannot
            be read straight into parameters, because these are on a GPU or have another dtype.

    Raises:
        CheckpointError: naming the tensors that are missing, unexpected, of another shape, or would lose bits. Also
            tensors that differ from those that they repeat, as the head of a tied model may.

    Example:
        >>> report = mb.load_hf_weights(models, "path/of/Qwen3-8B")
        >>> report.num_tensors, report.missing, report.unexpected
        (47, (), ())
    """
    provenance = provenance_on(models, hf, head)
    with uncollected() if isinstance(source, str | os.PathLike | Mapping) else contextlib.nullcontext():
        return _load_from(source, models, provenance, dtype, dialect, strict=strict, slot_bytes=slot_bytes)


def _load_from(
    source: Source,
    models: Models,
    provenance: Provenance,
    dtype: Dtypes,
    dialect: Dialect | None,
    *,
    strict: bool,
    slot_bytes: int,
) -> LoadReport:
    stored = _stored(source, provenance)
    if isinstance(stored, Checkpoint | DecodedCheckpoint):
        composites = [chunk for chunk in chunks_of(models) if getattr(chunk, "bridge", None) and chunk.bridge.whole]
        note_folder(composites, str(stored.folder), stored)  # has the other parts, for saves
    if isinstance(stored, Mapping):
        provenance = provenance.spelled_as(stored)
    if dialect is None and isinstance(stored, Mapping):
        dialect = dialect_of(stored, provenance.rules)
    load = _Load(bind(models, provenance, dialect=dialect, merged=False), dtype)
    device = next(
        (tensor.device for tensor in load.bound.tensors.values()), torch.device("cpu")
    )  # a stage may be empty
    with compiling(device):  # the kernel, for which the first export would wait
        _write_all(load, stored, strict=strict, slot_bytes=slot_bytes)
    return load.report()


def load_bound(bound: BoundModel, source: Mapping[str, Tensor], dtype: Dtypes) -> LoadReport:
    """Copy HF tensors into those tensors of this rank that are bound. What is missing or unexpected raises."""
    load = _Load(bound, dtype)
    _write_all(load, source, strict=True, slot_bytes=SLOT_BYTES)
    return load.report()


def note_folder(chunks: Iterable[GPTModel], folder: str, names: Collection[str]) -> None:
    """Have chunks that were built from a config know the folder that they were loaded from, and its tensors' names."""
    for chunk in chunks:
        if chunk.bridge.folder is None:
            chunk.bridge = chunk.bridge.loaded_from(folder, names)


def _stored(source: Source, provenance: Provenance) -> Mapping[str, Stored] | Iterable[tuple[str, Stored]]:
    """The source by plain names. The config of a folder describes its encoded weights, or else that of the model."""
    if isinstance(source, str | os.PathLike):
        source = Checkpoint(find_folder(source))
    if isinstance(source, Checkpoint):
        return opened_folder(source)
    quantization = read_quantization(getattr(provenance.hf, "quantization_config", None))
    if isinstance(source, Mapping):
        return decoded_mapping(source, quantization)
    if not isinstance(source, Iterable):
        raise CheckpointError(
            f"expected a folder, a mapping of HF names to tensors, or an iterable of such pairs, found {source!r}"
        )
    return DecodedPairs(source, quantization)


def _write_all(
    load: _Load, source: Mapping[str, Stored] | Iterable[tuple[str, Stored]], *, strict: bool, slot_bytes: int
) -> None:
    """Write all tensors of a source. Folders and mappings are checked before the first write."""
    mapping = load.bound.mapping
    if not isinstance(source, Mapping):
        for name, tensor in turned(with_prefix(source, mapping), mapping):
            load.check(name, tensor)
            load.write(name, tensor)
        load.check_names(renamed(load.seen, mapping), strict)
        load.ignored += unused_in(source)
        return
    source = renamed(source, mapping)
    load.check_names(source, strict)
    require_equal(source, mapping)
    load.ignored += unused_in(source)
    names = [name for name in source if name in load.uses]
    described = source.described if isinstance(source, Decoded) else source.__getitem__
    for name in names:
        load.check(name, described(name))
    if isinstance(source, Checkpoint | DecodedCheckpoint):
        files = source.files_of
        with Staging(slot_bytes) as staging:
            pairs: Iterator[tuple[str, Stored]] = source.pairs(names)
            copies = ((name, copy) for name, tensor in pairs for copy in load.slices(name, tensor, files(name)))
            read(((copy, files(name)[0]) for name, copy in copies), staging)
        return
    for name in names:
        load.write(name, source[name])


def _slice(use: _Use, copy: Copy, tensor: Tensor) -> Tensor:
    """The part of an HF tensor, or of its coordinates, that one copy uses."""
    return copy.of_part(use.of(tensor))


class _Load:
    """The state of one load: which HF tensors go where, and which have arrived."""

    def __init__(self, bound: BoundModel, dtype: Dtypes) -> None:
        self.bound = bound
        self.dtype = dtype
        self.uses: dict[str, list[_Use]] = {}
        self.seen: dict[str, None] = {}
        self.first: dict[str, str] = {}
        """The first name under which each HF tensor arrived, by its main name."""
        self._cuts: dict[object, EncodedSlice] = {}
        self.cast: dict[str, str] = {}
        self.ignored: list[str] = []
        self.initialised: list[str] = []
        self.missing: tuple[str, ...] = ()
        self.unexpected: tuple[str, ...] = ()
        self.num_bytes = 0
        for mcore in bound.tensors:
            self._use(mcore)

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
            self.uses.setdefault(whole, []).append(_Use(mcore, tensor, shape, copies, padding, index))

    def check_names(self, names: Iterable[str], strict: bool) -> None:
        """Check that this rank misses no tensor, and that some rank uses each tensor of the source."""
        names = dict.fromkeys(names)
        present = {mtp_layer_of(use.mcore) for name in names if name in self.uses for use in self.uses[name]}
        absent = [name for name in self.uses if name not in names]
        self.initialised = [name for name in absent if self._is_initialised(name, present)]
        missing = [name for name in absent if name not in self.initialised]
        others = self._not_elsewhere(name for name in names if name not in self.uses)
        mapping, mtp = self.bound.mapping, self.bound.axes["mtp"]
        self.ignored = [name for name in others if mapping.is_unused(name, num_mtp_layers=mtp)]
        unexpected = [name for name in others if not mapping.is_unused(name, num_mtp_layers=mtp)]
        self.missing, self.unexpected = tuple(missing), tuple(unexpected)
        if strict and (missing or unexpected):
            raise CheckpointError(
                f"the source does not fit the model: {len(missing)} tensors missing {missing[:8]}, {len(unexpected)} "
                f"unexpected {unexpected[:8]}. Use the checkpoint of this config, or strict=False to have them reported"
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
        """Whether a source may lack a tensor: one of a new head, or of an MTP layer that it lacks as a whole."""
        layers = {mtp_layer_of(use.mcore) for use in self.uses[name]}
        return self.bound.mapping.is_optional(name) or (None not in layers and layers.isdisjoint(present))

    def check(self, name: str, tensor: Stored | Held) -> None:
        """Compare kind, shape and dtype of an HF tensor with every parameter that it goes to."""
        if isinstance(tensor, Encoded | Held):
            self._check_encoded(name, tensor)
            return
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
            kind = f"{tensor.layout} on {tensor.device}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise CheckpointError(
                f"{name} must be a dense torch.Tensor that holds its values, found {kind}: convert it"
            )
        for use in self._uses_of(name):
            self._check_shape(name, tensor, use)
            crossing = self._crossing(name, tensor.dtype, use)
            if not is_exact(crossing, use.tensor.dtype):
                held = dtype_name(use.tensor.dtype)
                raise CheckpointError(
                    f"{name} is {dtype_name(crossing)} and {use.mcore} {held}, which cannot hold all its values; pass "
                    f"dtype=torch.{held} to cast, or build the model in another dtype"
                )
            if use.tensor.dtype != tensor.dtype:
                self.cast.setdefault(name, f"{dtype_name(tensor.dtype)} -> {dtype_name(use.tensor.dtype)}")

    def _check_encoded(self, name: str, tensor: Encoded | Held) -> None:
        """Compare the shape of an encoded tensor with every parameter; it is decoded into the dtype of any of them."""
        for use in self._uses_of(name):
            self._check_shape(name, tensor, use)
            self.cast.setdefault(name, f"{tensor.codec} -> {dtype_name(use.tensor.dtype)}")

    def _check_shape(self, name: str, tensor: Stored | Held, use: _Use) -> None:
        shape = use.shape if use.index is None else (self.bound.axes["experts"], *use.shape)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{name} has shape {tuple(tensor.shape)}, but {use.mcore} of shape {tuple(use.tensor.shape)} at "
                f"tp={self.bound.axes['tp']} takes {shape}; is this the checkpoint of this config?"
            )

    def write(self, name: str, tensor: Stored) -> None:
        """Copy this rank's slices of one HF tensor. If they have come under another name, compare them instead."""
        original = self.bound.mapping.twins.get(name, name)
        first = self.first.setdefault(original, name)
        for slice_copy in self.slices(name, tensor):
            if first == name:
                slice_copy.run()
            elif not slice_copy.is_in_place():
                raise differing(self.bound.mapping, [(name, first) if name != original else (first, name)])

    def slices(self, name: str, tensor: Stored, files: tuple[SafetensorsFile, ...] = ()) -> Iterator[AnyCopy]:
        """Set padding to zero, and yield the copies of one HF tensor, which has been checked.

        Args:
            files: the files of the tensor, or of its parts.
        """
        if name in self.seen:
            raise CheckpointError(f"{name} came twice; every HF tensor must come exactly once")
        self.seen[name] = None
        for use in self._uses_of(name):
            for dim, start, size in use.padding:
                use.tensor.narrow(dim, start, size).zero_()
            for copy in use.copies:
                target = copy.of_shard(use.tensor)
                if isinstance(tensor, Encoded):
                    encoded = self._cut(tensor, use, copy)
                    self.num_bytes += encoded.nbytes
                    yield EncodedCopy.of(encoded, target, files)
                    continue
                source = _slice(use, copy, tensor)
                self.num_bytes += source.nbytes
                yield SliceCopy(source, target, self._crossing(name, tensor.dtype, use))

    def _cut(self, weight: Encoded, use: _Use, copy: Copy) -> EncodedSlice:
        """The slice of an encoded weight that one copy uses. Equal copies of weights of one shape have equal slices."""
        key = (copy, use.index, weight.shape, weight.order)
        if key not in self._cuts:
            self._cuts[key] = weight.cut(partial(_slice, use, copy))
        return self._cuts[key].of(weight)

    def _uses_of(self, name: str) -> list[_Use]:
        """The uses of a tensor; if it repeats another one, the uses of that."""
        return self.uses.get(self.bound.mapping.twins.get(name, name), [])

    def _crossing(self, name: str, own: torch.dtype, use: _Use) -> torch.dtype:
        """The dtype of a tensor on its way: its own if the parameter holds all its values, as for a router's bias."""
        return own if is_exact(own, use.tensor.dtype) else wanted_dtype(name, own, self.dtype)

    def report(self) -> LoadReport:
        """The report of a finished load."""
        read = tuple(name for name in self.uses if name in self.first or name in self.seen)
        return LoadReport(
            len(read),
            self.num_bytes,
            tuple(self.initialised),
            tuple(self.ignored),
            self.cast,
            self.missing,
            self.unexpected,
        )
