"""Exports adapters under HF names, and saves or loads PEFT folders, with the plans, messages and files of weights."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from mcore_bridge import arguments
from mcore_bridge.arguments import COUNT, DEVICE, FLAG, require
from mcore_bridge.config.hf import write_fields
from mcore_bridge.config.mesh.alike import Shared, agreed, replica_groups
from mcore_bridge.errors import CheckpointError
from mcore_bridge.rules.adapters import Adapters, base_name
from mcore_bridge.rules.dtypes import Dtypes, has_same_bits, wanted_dtype
from mcore_bridge.rules.mapping import pattern_of
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.agreement import Export, Only, agree_on_plan, open_export, unless
from mcore_bridge.weights.bound import BoundModel, bind, provenance_on
from mcore_bridge.weights.export import converted
from mcore_bridge.weights.files.atomic_folder import Update, commit, target_of, updating_by_all
from mcore_bridge.weights.files.background import PendingSave, settle
from mcore_bridge.weights.files.file_shards import FileShard
from mcore_bridge.weights.files.hf_folder import content_of
from mcore_bridge.weights.files.sources import SourceFolders
from mcore_bridge.weights.files.staging import SLOT_BYTES, Staging
from mcore_bridge.weights.load import load_bound
from mcore_bridge.weights.load_state import LoadReport
from mcore_bridge.weights.manifest import Manifest, ManifestEntry
from mcore_bridge.weights.model_chunks import Models, adapters_of, chunks_of, groups_of
from mcore_bridge.weights.own_folder import is_source, note_source, require_held
from mcore_bridge.weights.peft.peft_config import CONFIG, STACKS, WEIGHTS, PeftNames, portable_config, shortest_ends
from mcore_bridge.weights.peft.peft_folder import (
    PeftFolder,
    memory_prefixes,
    open_peft,
    require_peft_names,
    stored_dtypes,
)
from mcore_bridge.weights.plan.target import Target
from mcore_bridge.weights.provenance import Provenance
from mcore_bridge.weights.save import BUCKET_SLOTS, WriterByName, open_files, run_save, write_pairs
from mcore_bridge.weights.transfer.collectives import Group
from mcore_bridge.weights.transfer.executor import run_program
from mcore_bridge.weights.transfer.failures import raise_on_all, require_alike

_OF_PEFT = (CONFIG, WEIGHTS, "adapter_model.bin")
_ADAPTERS = Only(adapters=True)


def iter_hf_adapters(
    models: Models,
    *,
    dtype: Dtypes = None,
    device: torch.device | str | None = None,
    bucket_bytes: int | None = None,
    target: Target = "everything",
) -> Iterator[tuple[str, Tensor]]:
    """Yield each ``lora_A`` and ``lora_B``, whole, with equal names, order and bits on every rank.

    Adapters of DoRA have each ``lora_magnitude_vector``, too.

    If HF holds experts in one tensor, their adapters come in one tensor too, ``[experts, rank, in]`` and ``[experts,
    out, rank]``. All ranks of a model replica iterate together. Tensors are copies that the caller may keep. The scale
    ``alpha / rank`` is not in them.

    Args:
        models: this rank's chunks with adapters, wrapped or not.
        dtype, device, bucket_bytes, target: as for ``iter_hf_weights``. With an ``EngineRank``, adapters are cut like
            the weights. Most engines cut adapters themselves, and need "everything".

    Yields:
        HF names of ``lora_A`` and ``lora_B`` weights, each with its tensor: ``[rank, in]`` and ``[out, rank]``.

    Raises:
        ExportError, TargetError: on every rank of the group, when any of them fails, or has no adapters or others.

    Example:
        >>> for name, tensor in mb.iter_hf_adapters(policy):
        ...     if "layers.0" in name:
        ...         print(name, tuple(tensor.shape))
        model.layers.0.self_attn.q_proj.lora_A.weight (16, 48)
        model.layers.0.self_attn.v_proj.lora_A.weight (16, 48)
        model.layers.0.self_attn.q_proj.lora_B.weight (192, 16)
        model.layers.0.self_attn.v_proj.lora_B.weight (96, 16)
    """
    problem = arguments.problem_of(device=(device, DEVICE.or_none()))
    options: dict[str, Any] = {"bucket_bytes": bucket_bytes, "target": unless(problem, target), "dtype": dtype}
    yield from _pairs(open_export(models, None, "lm", only=_ADAPTERS, **options), dtype, device)


def _pairs(export: Export, dtype: Dtypes, device: torch.device | str | None) -> Iterator[tuple[str, Tensor]]:
    """Run an export of adapters."""
    made = adapters_of(export.bound.chunks)
    with closing(run_program(export.program, export.group, export.held)) as pairs:
        for name, tensor in converted(pairs, dtype, device):
            yield name, tensor
            for other in made.further_names(name):
                yield other, tensor.clone()


def iter_peft_adapters(models: Models, *, device: torch.device | str | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that ``save_hf_adapters`` writes, whole, on every rank, with PEFT's names and order.

    Args:
        models: this rank's chunks with adapters, wrapped or not.
        device: as for ``iter_hf_weights``.

    Raises:
        ExportError: as ``iter_hf_adapters``.
    """
    problem = arguments.problem_of(device=(device, DEVICE.or_none()))
    export = open_export(models, None, "lm", only=_ADAPTERS, target=unless(problem, "everything"))
    stacked = {base_name(hf) for rule in export.bound.mapping.rules for hf in rule.hf if hf.endswith("[*]")}
    naming = replace(_naming(stacked, provenance_on(models)), memory=(), renamed=())
    yield from _in_peft(_pairs(export, None, device), naming)


class SaveAdapterOptions(TypedDict, total=False):
    """The optional arguments of ``save_hf_adapters``, without ``wait``."""

    dtype: Dtypes
    slot_bytes: int
    host_bytes: int | None


@overload
def save_hf_adapters(
    models: Models, folder: str | os.PathLike[str], *, wait: Literal[True] = True, **options: Unpack[SaveAdapterOptions]
) -> Manifest: ...


@overload
def save_hf_adapters(
    models: Models, folder: str | os.PathLike[str], *, wait: Literal[False], **options: Unpack[SaveAdapterOptions]
) -> PendingSave[Manifest]: ...


def save_hf_adapters(
    models: Models,
    folder: str | os.PathLike[str],
    *,
    dtype: Dtypes = None,
    slot_bytes: int = SLOT_BYTES,
    wait: bool = True,
    host_bytes: int | None = None,
) -> Manifest | PendingSave[Manifest]:
    """Write the adapters as a folder that ``peft``, vLLM and SGLang load: ``adapter_config.json`` and one file.

    The config always has one rank and one ``lora_alpha``, and names each module with an adapter. Experts in one tensor
    have PEFT's names and order for such parameters. All ranks of the job call it together, with a ``folder`` on a file
    system that they share. Like ``save_hf_checkpoint``, it replaces the files of an older adapter in one step; all
    other files of the folder stay.

    Args:
        models: this rank's chunks with adapters, wrapped or not.
        folder: created if it does not exist.
        dtype: cast tensors to this; by default each tensor keeps its dtype.
        slot_bytes: bytes that are written at once.
        wait: False returns as soon as the adapters in use are copied, and training may go on, also with another set. A
            thread of the first rank writes the file, as for ``save_hf_checkpoint``.
        host_bytes: how many bytes of copies the first rank may hold with ``wait=False``, as for ``save_hf_checkpoint``.

    Returns:
        The manifest of what was written, with PEFT's names. With ``wait=False`` a handle, whose ``wait()`` returns it.

    Raises:
        CheckpointError: on every rank, as for ``save_hf_checkpoint``, or when the models of any rank have no adapters.
            The folder is then unchanged.

    Example:
        >>> written = mb.save_hf_adapters(policy, "run/adapter_100")
        >>> len(written), written.tensors[0].name
        (16, 'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight')
    """
    world = Group(None)
    with raise_on_all(world, "nothing was written"):
        settle()
        target, made, provenance = target_of(folder), adapters_of(models), provenance_on(models)
        require(CheckpointError, slot_bytes=(slot_bytes, COUNT), wait=(wait, FLAG))
        require(CheckpointError, host_bytes=(host_bytes, COUNT.or_none()))
    require_alike(world, {"dtype": dtype, "slot_bytes": slot_bytes, "wait": wait})
    bucket_bytes = BUCKET_SLOTS * slot_bytes
    with ExitStack() as opened:
        update = opened.enter_context(updating_by_all(world, target))
        with raise_on_all(world, f"{target} was not changed"):
            export = agree_on_plan(models, None, "lm", bucket_bytes=bucket_bytes, only=_ADAPTERS, dtype=dtype)
            own = tuple(_with_further(export.program.plan.tensors(), made))
            naming = _naming([base_name(spec.name) for spec in own if len(spec.shape) == 3], provenance)
            specs = tuple(_as_peft(spec, naming, dtype) for spec in own)
            if world.rank == 0 and is_source(models, target):
                require_held(target, stored_dtypes(target), {spec.name: spec.dtype for spec in specs})
            files = opened.enter_context(ExitStack())
            shard = FileShard(WEIGHTS, 0, specs)
            writers = open_files([shard] if world.rank == 0 else [], update.new, files)
            config = _config(made, provenance, [spec.name for spec in own], naming)
        writing, written = _AdapterWriting(update, files, writers, config), Manifest(specs)
        pairs = _in_peft(iter_hf_adapters(models, dtype=dtype, bucket_bytes=bucket_bytes), naming)
        return run_save(writing, pairs, written, world, opened, slot_bytes=slot_bytes, host_bytes=host_bytes, wait=wait)


@dataclass(frozen=True)
class _AdapterWriting:
    """What a save writes to a folder, with the file that the first rank has opened."""

    update: Update
    files: ExitStack
    writers: WriterByName
    config: dict[str, Any]

    def finish(self, pairs: Iterator[tuple[str, Tensor]], staging: Staging, world: Group) -> None:
        """Write the tensors as they come, and the config, on all ranks of ``world`` together; then commit."""
        together = partial(raise_on_all, world, f"{self.update.target} was not changed")
        with together():
            write_pairs(pairs, self.writers, staging)
            self.files.close()
            if world.rank == 0:
                write_fields(self.update.new / CONFIG, self.config)
        with together():
            if world.rank == 0:
                commit(self.update, SourceFolders(), _OF_PEFT, (CONFIG,))


def load_adapters(models: Models, folder: str | os.PathLike[str], *, dtype: Dtypes = None) -> LoadReport:
    """Copy the adapters of a PEFT folder into the adapters of the models, in place and at any mesh.

    All ranks of a replica call it together, and compare what they are about to read. The folder must have exactly the
    adapters of the models, with an equal largest rank. Smaller ranks are padded with zeros, which is exact. If the
    scale of a module differs from the models' scale, its B is multiplied by the ratio and rounded once. This is exact
    if the ratio is a power of two. ``cast`` of the report names these tensors. The dropout of the models stays.

    Args:
        models: this rank's chunks with adapters, wrapped or not.
        folder: a folder of ``peft`` or ``save_hf_adapters``, or its name in the local hub cache. Every rank reads it,
            or a copy of it.
        dtype: cast tensors to this first, if an adapter cannot hold every value. By default this is an error.

    Returns:
        What this rank has read, and which tensors were cast.

    Raises:
        ConfigError: the models have no adapters, or there is no such folder.
        CheckpointError: naming all unsupported features (biases, ``modules_to_save``, ...), or the tensors that are
            missing, unexpected, of another shape, or would lose bits. Then nothing was written.

    Example:
        >>> mb.load_adapters(policy, "run/adapter_100").num_tensors
        16
    """

    def checked() -> tuple[tuple[BoundModel, Adapters, PeftFolder], Shared]:
        made, given = adapters_of(models), open_peft_for(models, folder)
        if given.rank != made.rank:
            raise CheckpointError(
                f"the adapter in {folder} has rank {given.rank}, the models {made.rank}: add adapters of that rank, "
                "or pass the folder to add_adapters"
            )
        if given.dora != made.dora:
            raise CheckpointError(
                f"the adapter in {folder} has use_dora={given.dora}, the models {made.dora}: add adapters with "
                f"dora={given.dora}, or pass the folder to add_adapters"
            )
        bound = bind(models, adapters=made)
        shared = {"folder": content_of(given.path), "scales": sorted(given.scales.items()), "dtype": dtype}
        return (bound, made, given), shared

    bound, made, given = agreed(replica_groups(groups_of(models)), checked, CheckpointError)
    report = load_peft(bound, made, given, dtype)
    note_source(models, given.path)
    return report


def open_peft_for(models: Models, folder: str | os.PathLike[str]) -> PeftFolder:
    """Open the adapters of a folder for these models. Errors: see ``open_peft``."""
    config = chunks_of(models)[0].config
    counts = {"num_layers": config.num_layers, "num_experts": config.num_moe_experts or 0}
    return open_peft(folder, provenance_on(models), **counts)


@torch.no_grad()
def load_peft(bound: BoundModel, made: Adapters, given: PeftFolder, dtype: Dtypes) -> LoadReport:
    """Copy the adapters of an open folder into bound tensors of adapters."""
    scale = made.alpha / made.rank
    report = load_bound(bound, _without_further(given.at(made.rank, scale), made), dtype)
    given.file.require_unchanged()
    folded = {name: f"times {factor:.6g}" for name, factor in given.factors(scale).items()}
    return replace(report, cast={**report.cast, **folded})


def _with_further(specs: Iterable[TensorSpec], made: Adapters) -> Iterator[TensorSpec]:
    for spec in specs:
        yield spec
        yield from (replace(spec, name=name) for name in made.further_names(spec.name))


def _without_further(tensors: dict[str, Tensor], made: Adapters) -> dict[str, Tensor]:
    """The tensors for adapters of these models. Further copies that ``peft`` needs must have equal bits."""
    again = {other: name for name in tensors for other in made.further_names(name)}
    if differ := [other for other, name in again.items() if not has_same_bits(tensors[name], tensors.get(other))]:
        raise CheckpointError(
            f"expected the same lora_A for all projections of a layer, as kind='shared' has, and {len(differ)} "
            f"differ or are missing, such as {differ[:4]}: add adapters of kind='own'"
        )
    return {name: tensor for name, tensor in tensors.items() if name not in again}


def _naming(stacked: Iterable[str], provenance: Provenance) -> PeftNames:
    """The names in a folder, given the HF names of parameters with all experts of a layer."""
    require_peft_names(provenance)
    naming = PeftNames(STACKS, memory_prefixes(provenance), provenance.renamed_in_memory, provenance.swapped_in_peft)
    ends = {naming.in_memory(module).rpartition(".")[2] for module in stacked}
    return replace(naming, stacks=tuple(name for name in STACKS if name in ends))


def _in_peft(pairs: Iterator[tuple[str, Tensor]], naming: PeftNames) -> Iterator[tuple[str, Tensor]]:
    with closing(pairs):  # type: ignore[type-var]  # a generator, as it promises
        for name, tensor in pairs:
            yield naming.to_peft(name), naming.unstacked(name, tensor)


def _as_peft(spec: TensorSpec, naming: PeftNames, dtype: Dtypes) -> ManifestEntry:
    shape = naming.unstacked(spec.name, torch.empty(spec.shape, device="meta")).shape
    return ManifestEntry(naming.to_peft(spec.name), tuple(shape), wanted_dtype(spec.name, spec.dtype, dtype))


def _config(made: Adapters, provenance: Provenance, names: Sequence[str], naming: PeftNames) -> dict[str, Any]:
    """The config for adapters with these names. If the last words of a module's name are unique, they are used."""
    adapted = dict.fromkeys(map(base_name, names))
    modules = [module for module in adapted if not naming.is_stack(module)]
    parameters = {".".join(naming.in_memory(module).split(".")[-3:]) for module in adapted if naming.is_stack(module)}
    patterns = set(map(pattern_of, adapted))
    others = {hf.removesuffix(".weight") for rule in provenance.mapping(tied=False).rules for hf in rule.hf} - patterns
    modules = [naming.in_memory(module) for module in modules]
    ends = shortest_ends(map(pattern_of, modules), map(naming.in_memory, others))
    ends = None if provenance.whole else ends  # a tower has such names, too
    base = provenance.folder or getattr(provenance.hf, "_name_or_path", None)
    return portable_config(modules if ends is None else ends, parameters, made, base=base, head=provenance.head)
