"""The work of one rank of ``verify``: build, load, export, and compare the result with the files, bit by bit.

It runs in a separate process, and returns its results as data.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from mcore_bridge.commands.verify.folders import entries_of
from mcore_bridge.commands.verify.logits import Comparison, compare_logits
from mcore_bridge.config.layer_kinds import held_mtp_layers
from mcore_bridge.errors import MappingError
from mcore_bridge.factory.blueprint import BuildOptions
from mcore_bridge.launch.worker import Report
from mcore_bridge.rules.dtypes import Dtypes, wanted_dtype
from mcore_bridge.rules.mapping import WeightMapping
from mcore_bridge.weights.export import iter_hf_weights
from mcore_bridge.weights.files.hf_folder import Checkpoint
from mcore_bridge.weights.files.sources import SourceFolders
from mcore_bridge.weights.manifest import Manifest, ManifestEntry, digest, manifest
from mcore_bridge.weights.model_chunks import adapters_of
from mcore_bridge.weights.peft.hf_adapters import iter_hf_adapters
from mcore_bridge.weights.peft.peft_folder import open_peft
from mcore_bridge.weights.progress import show_progress, tracked
from mcore_bridge.weights.save import save_hf_checkpoint
from mcore_bridge.weights.source.encoded_weights import scheme_in
from mcore_bridge.weights.source.source import Source, open_folder
from mcore_bridge.weights.source.weight_format import AS_PUBLISHED
from mcore_bridge.weights.transfer.collectives import Group
from mcore_bridge.weights.transfer.failures import raise_on_all

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The options of ``verify``, equal on every rank.

    Attributes:
        options: options of the build. Logits are computed without MTP layers.
        crossing: the dtype of each exported HF tensor.
        against: the folder whose files the export must equal; usually ``folder``.
        names: the tensors in ``against`` that the export must yield.
        num_tokens: the length of the sequences for logits; 0: no logits.
        save: a folder to write and to read back.
        adapter: a PEFT folder, whose adapters are added in fp32.
        sources: the folders that are read, as they were before.
    """

    folder: Path
    options: BuildOptions
    crossing: Dtypes
    against: Path
    names: tuple[str, ...]
    num_tokens: int
    save: Path | None
    adapter: Path | None = None
    sources: SourceFolders = field(default_factory=SourceFolders)


@dataclass(slots=True)
class RankResult:
    """The results of one rank.

    Attributes:
        exported: the manifest of the export, with digests, from this rank's replica.
        expected: this rank's part of the tensors in the folder that the export is compared with.
        saved: the tensors of ``expected``, but from the folder that this run has saved.
        held: bytes of this rank's parameters.
        seconds: times by phase.
        logits: on rank 0, unless they were left out; then ``skipped`` is the reason.
        widened: the tensors whose dtype is not the dtype of the model, such as a router's bias in fp32.
        stored: this rank's part of the tensors in a quantized folder, as the files have them.
        published: the manifest of the export in the format of this folder. None: the folder is not quantized, or
            ``unsent`` is the reason why codes cannot be sent.
        adapters: for each tensor of the adapter, whether its export has the bits of the PEFT folder.
    """

    exported: Manifest = field(default_factory=lambda: Manifest(()))
    expected: tuple[ManifestEntry, ...] = ()
    saved: tuple[ManifestEntry, ...] = ()
    held: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    logits: Comparison | None = None
    skipped: str = ""
    widened: tuple[str, ...] = ()
    stored: tuple[ManifestEntry, ...] = ()
    published: Manifest | None = None
    unsent: str = ""
    adapters: dict[str, bool] = field(default_factory=dict)

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Measures a phase, from when all ranks are ready until all have finished."""
        torch.distributed.barrier()
        start = time.perf_counter()
        yield
        torch.distributed.barrier()
        self.seconds[phase] = time.perf_counter() - start


class Watched(Source):
    """The tensors of a folder. It remembers when a load has begun."""

    def __init__(self, folder: Path) -> None:
        checkpoint = Checkpoint(folder)
        super().__init__(checkpoint, scheme_in(checkpoint))
        self.started = 0.0

    def for_model(self, mapping: WeightMapping) -> Self:
        """See ``Source.for_model``."""
        self.started = time.perf_counter()
        return super().for_model(mapping)


def check_rank(task: Task, report: Report) -> RankResult:
    """Runs all checks on one rank."""
    task.options.dims.initialize(device=str(task.options.device))
    report("start", 1, 1)
    finding = RankResult()
    chunks = _build(task, finding, report)
    finding.held = sum(parameter.nbytes for chunk in chunks for parameter in chunk.parameters())
    _export(chunks, task, finding, report)
    mapping = chunks[0].bridge.mapping(tied=chunks[0].share_embeddings_and_output_weights)
    finding.expected = _share(open_folder(task.against, mapping), task, task.crossing, report, "compare")
    _export_as_published(chunks, task, mapping, finding, report)
    if task.save is not None:
        with raise_on_all(Group(None)):
            task.sources.require_unchanged()
        with finding.timed("save"):
            save_hf_checkpoint(chunks, task.save, dtype=task.crossing, merged=False)
        finding.saved = _share(open_folder(task.save), task, None, report, "read back")
    if task.num_tokens:
        if task.options.dtype != torch.float32 or held_mtp_layers(vars(chunks[0].config)):
            chunks = []  # frees memory for the chunks in fp32
        finding.logits, finding.skipped = compare_logits(
            chunks,
            task.folder,
            replace(task.options, dims=task.options.dims.without_mtp(), dtype=torch.float32, overrides=None),
            num_tokens=task.num_tokens,
            num_parameters=sum(spec.numel for spec in finding.exported),
            adapter=task.adapter,
            report=report,
        )
    return finding


def _build(task: Task, finding: RankResult, report: Report) -> list[GPTModel]:
    from mcore_bridge.factory.add_adapters import add_adapters
    from mcore_bridge.factory.build import build_model

    torch.distributed.barrier()
    start = time.perf_counter()
    source = Watched(task.folder)
    with show_progress(report):
        chunks = build_model(task.folder, load_weights=source, **vars(task.options))
    if task.adapter is not None:
        add_adapters(chunks, task.adapter, dtype=torch.float32)
    torch.distributed.barrier()
    finding.seconds["build"] = source.started - start
    finding.seconds["load"] = time.perf_counter() - source.started
    return chunks


def _export(chunks: list[GPTModel], task: Task, finding: RankResult, report: Report) -> None:
    """Exports once as a trainer does, to measure the time; and once for the digests, which take longer."""
    with finding.timed("export"), show_progress(report):
        for _ in iter_hf_weights(chunks, dtype=task.crossing, merged=False):
            pass
    with finding.timed("digests"):
        finding.exported = manifest(chunks, dtype=task.crossing, digests=True, merged=False)
    own = {spec.name: spec.dtype for spec in manifest(chunks, merged=False)}
    plain = (spec for spec in finding.exported if spec.dtype.is_floating_point)
    if task.adapter is not None:
        finding.adapters = _adapters(chunks, task.adapter)
    finding.widened = tuple(spec.name for spec in plain if own[spec.name] not in (spec.dtype, task.options.dtype))


def _export_as_published(
    chunks: list[GPTModel], task: Task, mapping: WeightMapping, finding: RankResult, report: Report
) -> None:
    """Exports in the format of a quantized folder, and reads this rank's part of its tensors, as they are stored."""
    source = open_folder(task.folder, mapping)
    if not any(source.stored(name).encoding for name in task.names):
        return
    try:
        with finding.timed("as published"), show_progress(report):
            finding.published = manifest(chunks, quantize=AS_PUBLISHED, digests=True, merged=False)
    except MappingError as error:  # on every rank alike, before anything is sent
        finding.unsent = str(error)
        return
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    names = [spec.name for name in task.names for spec in source.raw_specs(name)][rank::world_size]
    plain = {name for name in task.names if source.stored(name).encoding is None}
    specs = []
    with show_progress(report):
        stored = Source(Checkpoint(task.folder))
        for name, tensor in tracked(stored.pairs(names), "codes", names.__len__):
            crossing = wanted_dtype(name, tensor.dtype, task.crossing) if name in plain else tensor.dtype
            held = tensor.to(crossing).to(tensor.dtype)
            specs.append(ManifestEntry(name, tuple(held.shape), held.dtype, digest(held)))
        stored.require_unchanged()
    finding.stored = tuple(specs)


def _adapters(chunks: list[GPTModel], folder: Path) -> dict[str, bool]:
    """For each tensor of the adapters, whether the files and the export have equal bits."""
    config, made = chunks[0].config, adapters_of(chunks)
    given = open_peft(folder, chunks[0].bridge, num_layers=config.num_layers, num_experts=config.num_moe_experts or 0)
    wanted = given.at(made.rank, made.alpha / made.rank)
    same = dict.fromkeys(wanted, False)
    for name, tensor in iter_hf_adapters(chunks):
        same[name] = name in wanted and torch.equal(tensor.cpu(), wanted[name].to(tensor.dtype))
    return same


def _share(source: Source, task: Task, crossing: Dtypes, report: Report, phase: str) -> tuple[ManifestEntry, ...]:
    """Specs and digests of this rank's part of the task's tensors, read from a folder and cast as an export casts."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    names = [name for name in task.names if name in source][rank::world_size]
    with show_progress(report):
        return entries_of(source, names, crossing, phase)
