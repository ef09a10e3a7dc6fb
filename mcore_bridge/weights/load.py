"""Loads HF weights: every rank copies its slices straight into its parameters, without communication.

Each element of each parameter is written exactly once, and each HF tensor of this rank is read once. Every other tensor
of a source must belong to another pipeline stage, or be in the architecture's list of ignored names.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mcore_bridge.arguments import COUNT, FLAG, accepts_former_names, require
from mcore_bridge.config.hf import find_folder
from mcore_bridge.config.mesh.alike import Content
from mcore_bridge.errors import CheckpointError
from mcore_bridge.machine import uncollected
from mcore_bridge.rules.dtypes import Dtypes
from mcore_bridge.rules.encoded import Weight
from mcore_bridge.rules.mapping import ExpertFormat
from mcore_bridge.rules.spec import runs_within
from mcore_bridge.rules.variants import expert_format_of, model_names
from mcore_bridge.weights.bound import BoundModel, bind, provenance_on
from mcore_bridge.weights.files.hf_folder import content_of
from mcore_bridge.weights.files.slice_reader import read
from mcore_bridge.weights.files.staging import SLOT_BYTES, Staging
from mcore_bridge.weights.load_state import Load, LoadReport
from mcore_bridge.weights.model_chunks import Models
from mcore_bridge.weights.own_folder import note_source
from mcore_bridge.weights.progress import tracked
from mcore_bridge.weights.provenance import HF, Provenance
from mcore_bridge.weights.source.source import HFWeights, Pairs, Source, open_source
from mcore_bridge.weights.source.tied_tensors import require_equal
from mcore_bridge.weights.transfer.copier import compiling

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

_BUFFERED = 1 << 30
"""Bytes of values that are read before parameters in FP8 are made from them."""


@accepts_former_names
def load_hf_weights(
    models: Models,
    source: HFWeights,
    *,
    hf: HF | None = None,
    head: str = "lm",
    dtype: Dtypes = None,
    expert_format: ExpertFormat | None = None,
    strict: bool = True,
    slot_bytes: int = SLOT_BYTES,
) -> LoadReport:
    """Copy HF weights into this rank's chunks, in place.

    Args:
        models: this rank's chunks, wrapped or not, on any device.
        source: a folder of safetensors, with or without index (or its hub name in the local cache), a mapping of HF
            names to tensors, or an iterable of pairs. Every rank needs a source, since ranks do not communicate.
            Folders and mappings are checked before the first write. Weights may be encoded (docs/guide/quantized.md):
            each slice is decoded on the device and to the dtype of its parameter. In an iterable, codes are kept until
            their scales come.
        hf, head: deprecated; call ``adopt`` once for models that ``build_model`` did not make.
        dtype: cast tensors to this first, if a parameter cannot hold every value of its source. By default such a
            parameter is an error.
        expert_format: how the source holds routed experts: "split" or "fused". By default the names of a folder or
            mapping decide; for an iterable, the default is the format of the models' checkpoint.
        strict: whether missing and unexpected tensors raise; otherwise they are reported.
        slot_bytes: bytes that are read from a file at once. If parameters are on a GPU or have another dtype, slices
            pass through about twelve times this amount of host memory.

    Returns:
        What this rank has read, and which tensors it did not use, or lacked.

    Raises:
        CheckpointError: naming the tensors that are missing, unexpected, of another shape, or would lose bits. Also
            copies that differ from their original, such as the head of a tied model.

    Example:
        >>> report = mb.load_hf_weights(models, "path/of/Qwen3-8B")
        >>> report.num_tensors, report.missing, report.unexpected
        (47, (), ())
    """
    require(CheckpointError, slot_bytes=(slot_bytes, COUNT), strict=(strict, FLAG))
    provenance = provenance_on(models, hf, head)
    return load_as(
        models, provenance, source, dtype=dtype, expert_format=expert_format, strict=strict, slot_bytes=slot_bytes
    )


@torch.no_grad()
def load_as(
    models: Models,
    provenance: Provenance,
    source: HFWeights,
    *,
    dtype: Dtypes = None,
    expert_format: ExpertFormat | None = None,
    strict: bool = True,
    slot_bytes: int = SLOT_BYTES,
) -> LoadReport:
    """Like ``load_hf_weights``, for a source that ``provenance`` describes. It may differ from the models' own."""
    with contextlib.ExitStack() as paused:
        paused.enter_context(uncollected())
        opened = open_source(source, getattr(provenance.hf, "quantization_config", None))
        if isinstance(opened, Pairs):
            paused.close()  # the code that makes the pairs may create reference cycles
            load = Load(bind(models, provenance, expert_format=expert_format, merged=False), dtype)
            with compiling(load.device):  # compiles the kernel, for which the first export would wait
                _write_pairs(load, opened, strict=strict)
            return load.report()
        provenance = provenance.spelled_as(opened)
        expert_format = expert_format_of(opened, provenance.rules) if expert_format is None else expert_format
        load = Load(bind(models, provenance, expert_format=expert_format, merged=False), dtype)
        _note_folder(models, load.bound, opened)
        with compiling(load.device):
            _write_source(load, opened, strict=strict, slot_bytes=slot_bytes)
    return load.report()


@torch.no_grad()
def overwrite(models: Models, tensors: Mapping[str, Weight], names: Iterable[str]) -> None:
    """Overwrite some parameters of loaded models with HF tensors.

    Args:
        models: this rank's chunks, as ``build_model`` has made them.
        tensors: by the names, and in the orientation, of the models' own rules.
        names: the names of the tensors to copy. This rank skips tensors that it does not hold.
    """
    load = Load(bind(models, merged=False), None)
    for name in names:
        if name in load.uses:
            load.check(name, tensors[name])
            load.write(name, tensors[name])
    load.close()


def load_bound(bound: BoundModel, source: Mapping[str, Tensor], dtype: Dtypes) -> LoadReport:
    """Copy HF tensors into the bound tensors of this rank. Missing and unexpected tensors raise."""
    load = Load(bound, dtype)
    _write_source(load, Source(source), strict=True, slot_bytes=SLOT_BYTES)
    return load.report()


def _note_folder(models: Models, bound: BoundModel, source: Source) -> None:
    """Store on chunks the folder that they are loaded from, above all for parts that a save copies."""
    if source.folder is not None:
        note_source(models, source.folder)
        own = [chunk for chunk in bound.chunks if getattr(chunk, "bridge", None)]
        has_parts = any(map(bound.mapping.is_not_built, source))
        note_folder([chunk for chunk in own if chunk.bridge.whole or has_parts], str(source.folder), source)


def described_source(source: HFWeights | None) -> Content | str | None:
    """The form in which ranks compare a source: the content of a folder. Mappings may differ, so all count as equal."""
    if source is None:
        return None
    return content_of(find_folder(source)) if isinstance(source, str | os.PathLike) else "tensors"


def note_folder(chunks: Iterable[GPTModel], folder: str, names: Collection[str]) -> None:
    """Store on chunks that were built from a config the folder that they were loaded from, and its names."""
    for chunk in chunks:
        if chunk.bridge.folder is None:
            chunk.bridge = chunk.bridge.loaded_from(folder, names)


def _write_source(load: Load, source: Source, *, strict: bool, slot_bytes: int) -> None:
    """Write all tensors of a source. The source is checked before the first write."""
    source = source.for_model(load.bound.mapping)
    load.check_names(source, source.unused, strict)
    require_equal(source, load.bound.mapping)
    names = [name for name in source if name in load.uses]
    for name in names:
        load.check(name, source.described(name))
    pairs = tracked(source.pairs(names), "load", names.__len__)
    if source.folder is None:
        for name, tensor in pairs:
            load.check(name, tensor)  # again, since a mapping may make a new tensor for each access
            load.write(name, tensor)
        load.close()
        return
    with Staging(slot_bytes) as staging:
        for run in runs_within(names, load.num_buffered, _BUFFERED):
            own = islice(pairs, len(run))
            read((copy for name, tensor in own for copy in load.slices(name, tensor, source.files(name))), staging)
            staging.finish()
            load.settle()
    next(pairs, None)  # reports and frees the last tensor
    load.close()
    source.require_unchanged()


def _write_pairs(load: Load, source: Pairs, *, strict: bool) -> None:
    mapping = load.bound.mapping
    for name, tensor in tracked(source.for_model(mapping), "load", lambda: 0):
        load.check(name, tensor)
        load.write(name, tensor)
    load.close()
    new = model_names(load.seen, mapping)
    load.check_names((new.get(name, name) for name in load.seen), source.unused, strict)
