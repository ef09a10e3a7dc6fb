"""HF to mcore: every rank copies the slices that it owns straight into its parameters. No collective.

Exactly once: each element of each parameter is written by one copy, each HF tensor of this rank is read once, and what
a source holds besides must belong to another pipeline stage or stand on the ignore list of the architecture.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from mcore_bridge.config.hf import find_folder
from mcore_bridge.config.quantization import read_quantization
from mcore_bridge.errors import CheckpointError
from mcore_bridge.rules.encoded import Encoded
from mcore_bridge.rules.mapping import Dialect, unstacked
from mcore_bridge.rules.names import expert_of, kind_of, mtp_layer_of
from mcore_bridge.rules.trace import Copy, Shape
from mcore_bridge.weights.bound import BoundModel, Models, bind, provenance_on
from mcore_bridge.weights.dtypes import Dtypes, dtype_name, is_exact, wanted_dtype
from mcore_bridge.weights.files.decoded import (
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
from mcore_bridge.weights.provenance import HF, Provenance, dialect_of
from mcore_bridge.weights.ties import differing, renamed, require_equal
from mcore_bridge.weights.transfer.copier import compiling

Source = str | os.PathLike[str] | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did on this rank.

    Attributes:
        num_tensors: HF tensors that this rank read from.
        num_bytes: bytes that it copied out of them, or compared with what it had copied.
        initialised: HF names that the source lacks and that were drawn instead: a new head, or MTP layers.
        ignored: HF names in the source that the architecture leaves unused, and further ones of a tensor that was used.
        cast: HF names whose dtype was changed on the way, as ``"float32 -> bfloat16"``; and those that were decoded, as
            ``"float8_e4m3fn[128x128] -> bfloat16"``, with the block that shares a scale.
        missing, unexpected: with ``strict=False``, what would have been an error.
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
    """One HF tensor's place in one parameter of this rank."""

    mcore: str
    tensor: Tensor
    shape: Shape
    copies: tuple[Copy, ...]
    padding: tuple[tuple[int, int, int], ...]
    index: int | None
    """The entry of the HF tensor, along dim 0, whose shape is ``shape``; None is all of it."""

    def of(self, hf_tensor: Tensor) -> Tensor:
        """What of an HF tensor goes into the parameter."""
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
            names to tensors, or an iterable of pairs (on every rank, as there is no collective). Folders and mappings
            are checked before the first write. Weights may be encoded (docs/quantized.md): each slice is decoded into
            the dtype of its parameter, where that is. Of pairs, codes wait until their scales have come.
        hf, head: for models that ``build_model`` did not make: their HF config or folder, and their head.
        dtype: what tensors are cast to on the way, where a parameter cannot hold every value of its source. By default
            that raises.
        dialect: how the source holds routed experts: "split" or "fused". None finds it out by the names of a folder or
            mapping; of an iterable, it is that of the checkpoint that the models come from.
        strict: whether missing and unexpected tensors raise, or are reported.
        slot_bytes: what is read from a file at once. Some twelve times that is held in host memory, where slices cannot
            be read straight into place: of parameters on a GPU, or of another dtype.

    Raises:
        CheckpointError: naming the tensors that are missing, unexpected, of another shape, or would lose bits; or that
            differ from those that they repeat, as the head of a tied model may.
    """
    provenance = provenance_on(models, hf, head)
    stored = _stored(source, provenance)
    if dialect is None and isinstance(stored, Mapping):
        dialect = dialect_of(stored, provenance.rules)
    load = _Load(bind(models, provenance, dialect=dialect), dtype)
    device = next(
        (tensor.device for tensor in load.bound.tensors.values()), torch.device("cpu")
    )  # a stage may be empty
    with compiling(device):  # what the first export would wait for
        _write_all(load, stored, strict=strict, slot_bytes=slot_bytes)
    return load.report()


def _stored(source: Source, provenance: Provenance) -> Mapping[str, Stored] | Iterable[tuple[str, Stored]]:
    """A source by plain names. What a folder says of encoded weights counts, or else the config of the model."""
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
    """All of a source, checked first where it can be."""
    mapping = load.bound.mapping
    if not isinstance(source, Mapping):
        for name, tensor in source:
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
    for name in names:
        load.check(name, source[name])
    if isinstance(source, Checkpoint | DecodedCheckpoint):
        files = source.files_of
        with Staging(slot_bytes) as staging:
            pairs: Iterator[tuple[str, Stored]] = source.pairs(names)
            copies = ((name, each) for name, tensor in pairs for each in load.slices(name, tensor, files(name)))
            read(((each, files(name)[0]) for name, each in copies), staging)
        return
    for name in names:
        load.write(name, source[name])


def _slice(use: _Use, copy: Copy, tensor: Tensor) -> Tensor:
    """What one copy takes of an HF tensor, or of its coordinates."""
    return copy.of_part(use.of(tensor))


class _Load:
    """The state of one load: which HF tensors go where, and which have come."""

    def __init__(self, bound: BoundModel, dtype: Dtypes) -> None:
        self.bound = bound
        self.dtype = dtype
        self.uses: dict[str, list[_Use]] = {}
        self.seen: dict[str, None] = {}
        self.first: dict[str, str] = {}
        """By the names of HF tensors, under which of their names they came first."""
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
        """Both directions of totality for this rank: nothing missing, nothing that no rank would use."""
        names = dict.fromkeys(names)
        present = {mtp_layer_of(use.mcore) for name in names if name in self.uses for use in self.uses[name]}
        absent = [name for name in self.uses if name not in names]
        self.initialised = [name for name in absent if self._is_initialised(name, present)]
        missing = [name for name in absent if name not in self.initialised]
        others = self._not_elsewhere(name for name in names if name not in self.uses)
        unused = {name: self._is_unused(name) for name in others}
        self.ignored = [name for name in others if unused[name]]
        unexpected = [name for name in others if not unused[name]]
        self.missing, self.unexpected = tuple(missing), tuple(unexpected)
        if strict and (missing or unexpected):
            raise CheckpointError(
                f"the source does not fit the model: {len(missing)} tensors missing {missing[:8]}, {len(unexpected)} "
                f"unexpected {unexpected[:8]}. Use the checkpoint of this config, or strict=False to have them reported"
            )

    def _not_elsewhere(self, names: Iterable[str]) -> list[str]:
        """Of ``names``, what no other rank takes; of the experts of a layer, the last is asked about for all."""
        kinds: dict[str, list[str]] = {}
        for name in names:
            kinds.setdefault(kind_of(name), []).append(name)
        found = (kind for kind in kinds.values() if not self._is_elsewhere(max(kind, key=lambda x: expert_of(x) or 0)))
        return [name for kind in found for name in kind if not self._is_elsewhere(name)]

    def _is_elsewhere(self, name: str) -> bool:
        return any(map(self.bound.is_elsewhere, self.bound.mapping.consumers(name)))

    def _is_unused(self, name: str) -> bool:
        return self.bound.mapping.is_unused(name, num_mtp_layers=self.bound.axes["mtp"])

    def _is_initialised(self, name: str, present: set[int | None]) -> bool:
        """A source may lack a new head, and any MTP layer as a whole."""
        layers = {mtp_layer_of(use.mcore) for use in self.uses[name]}
        return self.bound.mapping.is_optional(name) or (None not in layers and layers.isdisjoint(present))

    def check(self, name: str, tensor: Stored) -> None:
        """Kind, shape and dtype of an HF tensor against every place that it goes to."""
        if isinstance(tensor, Encoded):
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

    def _check_encoded(self, name: str, tensor: Encoded) -> None:
        """Any dtype can hold what is decoded into it."""
        for use in self._uses_of(name):
            self._check_shape(name, tensor, use)
            self.cast.setdefault(name, f"{tensor.codec} -> {dtype_name(use.tensor.dtype)}")

    def _check_shape(self, name: str, tensor: Stored, use: _Use) -> None:
        shape = use.shape if use.index is None else (self.bound.axes["experts"], *use.shape)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{name} has shape {tuple(tensor.shape)}, but {use.mcore} of shape {tuple(use.tensor.shape)} at "
                f"tp={self.bound.axes['tp']} takes {shape}; is this the checkpoint of this config?"
            )

    def write(self, name: str, tensor: Stored) -> None:
        """Copy this rank's slices of one HF tensor into place; if they are there under another name, compare them."""
        original = self.bound.mapping.twins.get(name, name)
        first = self.first.setdefault(original, name)
        for each in self.slices(name, tensor):
            if first == name:
                each.run()
            elif not each.is_in_place():
                raise differing(self.bound.mapping, [(name, first) if name != original else (first, name)])

    def slices(self, name: str, tensor: Stored, files: tuple[SafetensorsFile, ...] = ()) -> Iterator[AnyCopy]:
        """What is to be copied of one HF tensor, once padding is zero. The tensor has been checked.

        Args:
            files: of the tensor, or of its parts.
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
                    encoded = tensor.cut(partial(_slice, use, copy))
                    self.num_bytes += encoded.nbytes
                    yield EncodedCopy.of(encoded, target, files)
                    continue
                source = _slice(use, copy, tensor)
                self.num_bytes += source.nbytes
                yield SliceCopy(source, target, self._crossing(name, tensor.dtype, use))

    def _uses_of(self, name: str) -> list[_Use]:
        """Where a tensor goes: to the places of the one that it repeats, if it is a further one."""
        return self.uses.get(self.bound.mapping.twins.get(name, name), [])

    def _crossing(self, name: str, own: torch.dtype, use: _Use) -> torch.dtype:
        """The dtype in which a tensor crosses: its own where its place can hold all values, such as a router's bias."""
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
