"""HF to mcore: every rank copies the slices that it owns straight into its parameters, without communication.

Each element of each parameter is written exactly once, and each HF tensor of this rank is read once. All else in a
source must belong to another pipeline stage, or be on the architecture's list of ignored names.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mcore_bridge.config.hf import find_folder
from mcore_bridge.config.mesh.alike import Content
from mcore_bridge.config.quantization import read_quantization
from mcore_bridge.errors import CheckpointError, shown
from mcore_bridge.rules.dialects import dialect_of
from mcore_bridge.rules.mapping import Dialect
from mcore_bridge.weights.base_names import with_prefix
from mcore_bridge.weights.bound import BoundModel, Models, bind, provenance_on
from mcore_bridge.weights.dtypes import Dtypes
from mcore_bridge.weights.files.decoded import (
    Decoded,
    DecodedCheckpoint,
    DecodedPairs,
    Stored,
    decoded_mapping,
    opened_folder,
    unused_in,
)
from mcore_bridge.weights.files.file_shards import require_positive
from mcore_bridge.weights.files.hf_folder import Checkpoint, content_of
from mcore_bridge.weights.files.slice_reader import read
from mcore_bridge.weights.files.staging import SLOT_BYTES, Staging
from mcore_bridge.weights.gc_paused import uncollected
from mcore_bridge.weights.load_state import Load, LoadReport
from mcore_bridge.weights.orientation import turned
from mcore_bridge.weights.own_folder import note_source
from mcore_bridge.weights.provenance import HF, Provenance
from mcore_bridge.weights.ties import renamed, require_equal
from mcore_bridge.weights.transfer.copier import compiling

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

Source = str | os.PathLike[str] | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


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
        hf, head: deprecated; call ``adopt`` once for models that ``build_model`` did not make.
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
    require_positive(slot_bytes=slot_bytes)
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
    if isinstance(stored, Mapping):
        provenance = provenance.spelled_as(stored)
    if dialect is None and isinstance(stored, Mapping):
        dialect = dialect_of(stored, provenance.rules)
    load = Load(bind(models, provenance, dialect=dialect, merged=False), dtype)
    if isinstance(stored, Checkpoint | DecodedCheckpoint):
        note_source(models, stored.folder)
        _note_parts(load.bound, stored)
    device = next(
        (tensor.device for tensor in load.bound.tensors.values()), torch.device("cpu")
    )  # a stage may be empty
    with compiling(device):  # the kernel, for which the first export would wait
        _write_all(load, stored, strict=strict, slot_bytes=slot_bytes)
    return load.report()


@torch.no_grad()
def overwrite(models: Models, tensors: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """Copy some HF tensors over those of models that are loaded.

    Args:
        models: this rank's chunks, as ``build_model`` has made them.
        tensors: by the names, and in the orientation, of the models' own rules.
        names: of those that are copied. This rank skips tensors that it does not hold.
    """
    load = Load(bind(models, merged=False), None)
    for name in names:
        if name in load.uses:
            load.check(name, tensors[name])
            load.write(name, tensors[name])


def load_bound(bound: BoundModel, source: Mapping[str, Tensor], dtype: Dtypes) -> LoadReport:
    """Copy HF tensors into those tensors of this rank that are bound. What is missing or unexpected raises."""
    load = Load(bound, dtype)
    _write_all(load, source, strict=True, slot_bytes=SLOT_BYTES)
    return load.report()


def _note_parts(bound: BoundModel, stored: Checkpoint | DecodedCheckpoint) -> None:
    """Have chunks know a folder with parts that are not built, since a save copies these."""
    own = [chunk for chunk in bound.chunks if getattr(chunk, "bridge", None)]
    has_parts = any(map(bound.mapping.is_carried, stored))
    note_folder([chunk for chunk in own if chunk.bridge.whole or has_parts], str(stored.folder), stored)


def described_source(source: Source | None) -> Content | str | None:
    """A source for ranks to compare: a folder by its content. Each rank may have tensors of its own stage alone."""
    if source is None:
        return None
    return content_of(find_folder(source)) if isinstance(source, str | os.PathLike) else "tensors"


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
        if foreign := [name for name in source if not isinstance(name, str)]:
            raise CheckpointError(
                f"the source must be by HF names, found {shown(foreign[0])} among its names: leave it out"
            )
        return decoded_mapping(source, quantization)
    if not isinstance(source, Iterable):
        raise CheckpointError(
            f"expected a folder, a mapping of HF names to tensors, or an iterable of such pairs, found {shown(source)}"
        )
    return DecodedPairs(_pairs(source), quantization)


def _pairs(source: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for pair in source:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise CheckpointError(f"the source must yield pairs of an HF name and a tensor, found {shown(pair)}")
        yield pair


def _write_all(
    load: Load, source: Mapping[str, Stored] | Iterable[tuple[str, Stored]], *, strict: bool, slot_bytes: int
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
        source.require_unchanged()
        return
    for name in names:
        tensor = source[name]  # a mapping may make it anew
        load.check(name, tensor)
        load.write(name, tensor)
