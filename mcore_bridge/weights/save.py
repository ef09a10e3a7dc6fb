"""Saves an HF folder: all ranks write files in parallel as tensors come, and all files appear in one step."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, Unpack, overload

import torch
from torch import Tensor

from mcore_bridge.architecture import is_draft, read_draft, read_hf
from mcore_bridge.arguments import COUNT, FLAG, accepts_former_names, require
from mcore_bridge.config.class_names import class_in, set_class, stem_of
from mcore_bridge.config.quantization import Quantize
from mcore_bridge.errors import CheckpointError, plural
from mcore_bridge.rules.dtypes import Dtypes
from mcore_bridge.rules.mapping import ExpertFormat
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.bound import mapping_of, provenance_on
from mcore_bridge.weights.export import iter_hf_weights
from mcore_bridge.weights.files.atomic_folder import Update, commit, require_files, target_of, updating_by_all
from mcore_bridge.weights.files.background import HostCopies, PendingSave, copy_all, settle
from mcore_bridge.weights.files.file_shards import MAX_SHARD_BYTES, FileShard, assign_files
from mcore_bridge.weights.files.hf_folder import HEADS, weight_files, write_index
from mcore_bridge.weights.files.safetensors import SafetensorsWriter
from mcore_bridge.weights.files.sidecars import NOTES, copy_companions, copy_note
from mcore_bridge.weights.files.staging import SLOT_BYTES, InThisThread, Staging
from mcore_bridge.weights.manifest import Manifest, manifest
from mcore_bridge.weights.model_chunks import Models, chunks_of
from mcore_bridge.weights.not_built import Mtp, NotBuilt, not_built_of
from mcore_bridge.weights.own_folder import is_source, plain_dtypes, require_held
from mcore_bridge.weights.provenance import HF, Provenance, config_in, identity, write_config
from mcore_bridge.weights.source.weight_format import WeightFormat, plain_dtype, weight_format
from mcore_bridge.weights.transfer.collectives import Group
from mcore_bridge.weights.transfer.failures import raise_on_all, require_alike

if TYPE_CHECKING:
    from transformers import PretrainedConfig

BUCKET_SLOTS = 16
"""An export sends this many slots of tensors at once: more would only wait for the disk."""
logger = logging.getLogger("mcore_bridge")
WriterByName = dict[str, tuple[SafetensorsWriter, TensorSpec]]


class SaveOptions(TypedDict, total=False):
    """The optional arguments of ``save_hf_checkpoint``, without ``wait``."""

    hf: HF | None
    head: str
    dtype: Dtypes
    expert_format: ExpertFormat | None
    keep: bool
    max_shard_bytes: int
    slot_bytes: int
    merged: bool | None
    quantize: Quantize
    mtp: Mtp
    host_bytes: int | None


@overload
def save_hf_checkpoint(
    models: Models, folder: str | os.PathLike[str], *, wait: Literal[True] = True, **options: Unpack[SaveOptions]
) -> Manifest: ...


@overload
def save_hf_checkpoint(
    models: Models, folder: str | os.PathLike[str], *, wait: Literal[False], **options: Unpack[SaveOptions]
) -> PendingSave[Manifest]: ...


@accepts_former_names
def save_hf_checkpoint(
    models: Models,
    folder: str | os.PathLike[str],
    *,
    hf: HF | None = None,
    head: str = "lm",
    dtype: Dtypes = None,
    expert_format: ExpertFormat | None = None,
    keep: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    slot_bytes: int = SLOT_BYTES,
    merged: bool | None = None,
    quantize: Quantize = None,
    mtp: Mtp = "copied",
    wait: bool = True,
    host_bytes: int | None = None,
) -> Manifest | PendingSave[Manifest]:
    """Write sharded safetensors, index, config, and the tokenizer files of the folder that the model came from.

    Tensors of parts that are not built (a composite's tower, MTP layers) are copied from that folder, byte by byte.

    All ranks of the job call it together, with a ``folder`` on a file system that they share. The save replaces the
    files of an older checkpoint in one step. All other files, and the folder itself, stay unchanged. Only one job
    writes at a time. ``folder`` may be the folder that the models came from, unless a tensor there would lose bits by a
    cast.

    Args:
        models: this rank's chunks, wrapped or not.
        folder: created if it does not exist.
        hf, head: deprecated; call ``adopt`` once for models that ``build_model`` did not make.
        dtype: cast tensors to this; by default each tensor keeps its dtype.
        expert_format: the format of the experts, as for ``iter_hf_weights``.
        keep: whether an existing config and tokenizer in ``folder`` stay, for example if a trainer has changed them. In
            such a config we only set the dtype of the weights, the class for another head than an LM head, and the
            fields that ``overrides=`` of ``build_model`` have changed.
        max_shard_bytes: upper limit on the size of a file, unless one tensor is larger.
        slot_bytes: bytes that are written at once. Tensors on a GPU pass through about twelve times this amount of host
            memory.
        merged: whether the adapters of models that have some are merged, as for ``iter_hf_weights``.
        quantize: the format of the weights, as for ``iter_hf_weights``. The config describes it, and tensors of parts
            that are not built are copied as the folder with the format stores them.
        mtp: the fate of MTP layers that are not built. "copied": they are copied from the folder of the model,
            unchanged by training. "dropped": they are left out. The config counts the written MTP layers.
        wait: False returns as soon as this rank has copied what it writes, and training may go on. A thread writes the
            files, and then all files appear in one step.
        host_bytes: how many bytes of copies a rank may hold with ``wait=False``. It then copies further tensors when
            others are written, so the call takes longer. None: everything that the rank writes, the size of the
            checkpoint divided by the number of ranks.

    Returns:
        The manifest of what was written. With ``wait=False`` a handle, whose ``wait()`` returns the manifest.

    Raises:
        CheckpointError: on every rank, when any rank cannot write, ranks pass different arguments, another job writes
            to this folder, or the folder of copied tensors changes during the save. The target is then unchanged. With
            ``wait=False``, errors of the thread are raised by ``wait()``, or else by the next save.

    Example:
        >>> written = mb.save_hf_checkpoint(models, "run/step_100", dtype=torch.bfloat16)
        >>> len(written), written.num_bytes
        (47, 333024)
    """
    world = Group(None)
    with raise_on_all(world, "nothing was written"):
        settle()
        target, provenance = target_of(folder), provenance_on(models, hf, head)
        form = weight_format(quantize, provenance.folder)
        sizes = {"max_shard_bytes": max_shard_bytes, "slot_bytes": slot_bytes}
        require(CheckpointError, keep=(keep, FLAG), **{name: (size, COUNT) for name, size in sizes.items()})
        require(CheckpointError, wait=(wait, FLAG), host_bytes=(host_bytes, COUNT.or_none()))
    given: dict[str, Any] = {"dtype": dtype, "expert_format": expert_format, "head": head, "merged": merged}
    compared = {**given, **sizes, "keep": keep, "mtp": mtp, "quantize": form.digest, "wait": wait}
    require_alike(world, {"hf": identity(provenance), **compared})
    given["quantize"] = quantize
    together = partial(raise_on_all, world, f"{target} was not changed")
    bucket_bytes = BUCKET_SLOTS * slot_bytes
    with ExitStack() as opened:
        update = opened.enter_context(updating_by_all(world, target))
        with together():
            specs = manifest(models, hf=hf, **given, bucket_bytes=bucket_bytes)
            not_built = not_built_of(provenance, mapping_of(chunks_of(models)[0], provenance), mtp=mtp, form=form)
            specs = specs.with_tensors([*not_built.repeats(specs), *not_built.specs])
            if world.rank == 0 and is_source(models, target):
                require_held(target, *plain_dtypes(target, specs))
                _warn(f"{target} is a folder that these models came from: this save replaces its weights")
        copied = [len(specs), *not_built.repeated.values()]
        require_alike(world, {"tensors copied from the folder of the model": copied})
        with together():
            shards = assign_files(specs.tensors, world.size, max_shard_bytes)
            files = opened.enter_context(ExitStack())
            writers = open_files([shard for shard in shards if shard.rank == world.rank], update.new, files)
        writing = _FolderWriting(update, files, writers, shards, specs, not_built, provenance, form, keep)
        pairs = not_built.with_repeats(iter_hf_weights(models, hf=hf, **given, bucket_bytes=bucket_bytes))
        return run_save(writing, pairs, specs, world, opened, slot_bytes=slot_bytes, host_bytes=host_bytes, wait=wait)


class Writing(Protocol):
    """What a save of HF tensors writes to a folder."""

    @property
    def update(self) -> Update:
        """The change of the folder."""

    @property
    def writers(self) -> WriterByName:
        """The writers of this rank, by the tensors that they write."""

    def finish(self, pairs: Iterator[tuple[str, Tensor]], staging: Staging, world: Group) -> None:
        """Write the tensors as they come and everything else, on all ranks of ``world`` together; then commit."""


def run_save(
    writing: Writing,
    pairs: Iterator[tuple[str, Tensor]],
    written: Manifest,
    world: Group,
    opened: ExitStack,
    *,
    slot_bytes: int,
    host_bytes: int | None,
    wait: bool,
) -> Manifest | PendingSave[Manifest]:
    """Write a folder now, or copy all tensors now and write the folder in a thread.

    Args:
        writing: what to write.
        pairs: the tensors of all ranks.
        written: the manifest of the folder.
        world: all ranks, which call this together.
        opened: what ends with the save.
        slot_bytes, host_bytes, wait: as for ``save_hf_checkpoint``.
    """
    if wait:
        writing.finish(pairs, Staging(slot_bytes), world)
        return written
    copies = HostCopies(host_bytes)
    finish = partial(writing.finish, copies.taken(), InThisThread(slot_bytes))
    pending = PendingSave(writing.update.target, written, copies, finish, opened)
    return copy_all(pending, world, held_in(pairs, writing.writers), own=True)


@dataclass(frozen=True)
class _FolderWriting:
    """What a save writes to a folder, with the files that this rank has opened."""

    update: Update
    files: ExitStack
    writers: WriterByName
    shards: Sequence[FileShard]
    specs: Manifest
    not_built: NotBuilt
    provenance: Provenance
    form: WeightFormat
    keep: bool

    def finish(self, pairs: Iterator[tuple[str, Tensor]], staging: Staging, world: Group) -> None:
        """Write the tensors as they come and everything else, on all ranks of ``world`` together; then commit."""
        target, new = self.update.target, self.update.new
        together = partial(raise_on_all, world, f"{target} was not changed")
        with together():
            write_pairs(_and_not_built(pairs, self.not_built, self.writers), self.writers, staging)
            self.files.close()
            self.not_built.sources.require_unchanged()
            if world.rank == 0:
                if self.not_built.note:
                    _warn(self.not_built.note)
                kept = target if self.keep else None
                _write_rest(self.shards, self.specs, self.provenance, new, kept, self.form)
        with together():
            if world.rank == 0:
                require_files(new, [shard.name for shard in self.shards])
                commit(self.update, self.not_built.sources, (*weight_files(target), *NOTES), HEADS)


def held_in(pairs: Iterator[tuple[str, Tensor]], writers: WriterByName) -> Generator[tuple[str, Tensor]]:
    """The tensors of this rank's files."""
    with closing(pairs):  # type: ignore[type-var]  # a generator, as it promises
        yield from ((name, tensor) for name, tensor in pairs if name in writers)


@functools.cache
def _warn(message: str) -> None:
    """Warn once in a process, since a run saves many times."""
    logger.warning(message)


def _and_not_built(
    pairs: Iterator[tuple[str, Tensor]], not_built: NotBuilt, writers: WriterByName
) -> Iterator[tuple[str, Tensor]]:
    """The exported tensors, and the copied tensors of this rank's files."""
    yield from pairs
    yield from not_built.pairs(spec.name for spec in not_built.specs if spec.name in writers)


def open_files(shards: Sequence[FileShard], folder: Path, stack: ExitStack) -> WriterByName:
    """Open this rank's files, all or none, and return the writer for each tensor."""
    writers: WriterByName = {}
    with ExitStack() as opened:
        for shard in shards:
            writer = opened.enter_context(SafetensorsWriter(folder / shard.name, shard.tensors))
            writers.update((spec.name, (writer, spec)) for spec in shard.tensors)
        stack.enter_context(opened.pop_all())
    return writers


def write_pairs(pairs: Iterator[tuple[str, Tensor]], writers: WriterByName, staging: Staging) -> None:
    """Write this rank's tensors as they come, and skip all others."""
    waiting = dict(writers)
    # The iterator is closed explicitly: an error keeps its frames alive, and other ranks would wait for this rank.
    with staging, closing(pairs):  # type: ignore[type-var]  # a generator, as it promises
        for name, tensor in pairs:
            if name not in waiting:
                continue
            writer, spec = waiting.pop(name)
            if (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
                raise CheckpointError(
                    f"{name} came as {tensor.dtype} {tuple(tensor.shape)}, the manifest has {spec}: change no model "
                    "while it is saved"
                )
            _write_tensor(tensor, partial(writer.write, name), staging)
    if waiting:
        raise CheckpointError(f"the export lacks {plural(len(waiting), 'tensor')} of its manifest: {list(waiting)[:8]}")


def _write_tensor(tensor: Tensor, write: Callable[[int, Tensor], None], staging: Staging) -> None:
    """Let threads write a tensor: from its own memory, or from a slot to which it is copied if it is on a GPU."""
    flat = tensor.contiguous().flatten().view(torch.uint8)
    for start in range(0, flat.nbytes, staging.slot_bytes):
        piece = flat[start : start + staging.slot_bytes]
        slot = staging.take()
        if not piece.is_cpu:
            memory = slot.memory(piece.nbytes, piece.device)
            memory.copy_(piece, non_blocking=piece.is_cuda)
            slot.mark(piece.device)
            piece = memory
        staging.submit(slot, partial(write, start, piece))


def _write_rest(
    shards: Sequence[FileShard],
    specs: Manifest,
    provenance: Provenance,
    staging: Path,
    kept: Path | None,
    form: WeightFormat,
) -> None:
    """Write all files except files of tensors. If ``kept`` has a config or a tokenizer, these stay."""
    write_index(staging, {shard.name: shard.tensors for shard in shards})
    names = os.listdir(kept) if kept is not None and kept.is_dir() else []
    copy_companions(provenance.folder, staging, kept=names)
    if form.folder is not None:
        copy_note(Path(form.folder), staging)
    if kept is not None and "config.json" in names:
        read = read_draft if is_draft(provenance.hf) else read_hf
        provenance = provenance.with_config(read(kept))
    config = _config_of(specs, provenance)
    config.update(form.config_fields(specs.tensors))
    write_config(config, staging)


def _config_of(specs: Manifest, provenance: Provenance) -> PretrainedConfig:
    """The HF config for the manifest: with its dtype and, for another head than an LM head, with the class of that
    head.
    """
    names = [spec.name for spec in specs]
    hf = config_in(provenance, plain_dtype(specs), tied=provenance.lm_head not in names, names=names)
    score = next((spec for spec in specs if spec.name in ("score.weight", "score.2.weight")), None)
    if score is not None:
        biased = any(spec.name == "score.bias" for spec in specs)
        linear = "ForTokenClassification" if biased else "ForSequenceClassification"
        kind = "ForProcessRewardModel" if provenance.head == "process_reward" else linear
        set_class(hf, f"{stem_of((class_in(hf) or [''])[0])}{kind}")
        hf.num_labels = score.shape[0]
    return hf
