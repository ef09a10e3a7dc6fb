"""``mcore-bridge verify``: checks that a mesh exports a checkpoint bit by bit, and computes transformers' logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mcore_bridge.arguments import given_path
from mcore_bridge.commands.verify.logits import Comparison
from mcore_bridge.commands.verify.rank import RankResult, Task, check_rank
from mcore_bridge.config.layer_kinds import held_mtp_layers
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.config.transformer import BUILDABLE
from mcore_bridge.config.unread_fields import notes_on
from mcore_bridge.errors import CheckpointError, ConfigError
from mcore_bridge.factory.blueprint import BuildOptions
from mcore_bridge.factory.supports import require_supported
from mcore_bridge.launch.processes import OnEvent, run_ranks
from mcore_bridge.rules.dtypes import Dtypes, dtype_name
from mcore_bridge.rules.mapping import WeightMapping
from mcore_bridge.rules.names import mtp_layer_of
from mcore_bridge.weights.files.atomic_folder import target_of
from mcore_bridge.weights.files.sources import SourceFolders
from mcore_bridge.weights.manifest import Manifest
from mcore_bridge.weights.provenance import Provenance
from mcore_bridge.weights.source.source import Source, open_folder

if TYPE_CHECKING:
    from mcore_bridge.factory.blueprint import Blueprint


@dataclass(frozen=True, slots=True)
class Verdict:
    """The results of all ranks. Names are names of HF tensors.

    Attributes:
        folder: the checkpoint.
        model_type: the ``model_type`` of its config.
        tower: whether a composite's models of images are built.
        mesh: sizes by axis, ``sp``, and the ``layout`` or None.
        ranks: processes that were started.
        dtype: the dtype of the model.
        parameters: the number of parameters of the whole model.
        tensors: the number of tensors that were compared.
        bytes: bytes of the tensors that were exported.
        decoded: how many of the tensors were decoded, by the format in the files.
        rank_bytes: parameters of the fullest rank.
        seconds: times of the slowest rank, by phase.
        different: names whose bits differ between the files and the export on any rank.
        saved_different: names whose bits differ between the files and the saved folder. None: nothing was saved.
        adapter_different: names of the adapter's tensors whose bits differ between the PEFT folder and the export on
            any rank. None: there is no adapter.
        encoded: the number of encoded tensors in the files: codes, scales and what else belongs to them.
        encoded_different: names whose bits differ between the files and the export with ``quantize="as_published"`` on
            any rank. None: the files are not quantized, or this export was left out.
        encoded_left_out: why a quantized folder was not exported so, such as a mesh that cuts its codes. None: it was.
        logits: the comparison with transformers, or with ``peft``. None: it was left out.
        logits_left_out: why there is no comparison of logits. None: there is one.
        not_built: names of a composite's other parts, which a save copies.
        unused: names in the files that no parameter uses, and no save copies.
        drawn: names of MTP layers that the files lack. They have random values, and are exported.
        notes: remarks on fields of the config that change nothing.
        widened: names of tensors that the model holds in a wider dtype than the files. The export has the dtype of the
            files.
    """

    folder: Path
    model_type: str
    tower: bool
    mesh: ParallelDims
    ranks: int
    dtype: torch.dtype
    parameters: int
    tensors: int
    bytes: int
    decoded: Mapping[str, int]
    rank_bytes: int
    seconds: Mapping[str, float]
    different: tuple[str, ...]
    saved_different: tuple[str, ...] | None
    adapter_different: tuple[str, ...] | None
    encoded: int
    encoded_different: tuple[str, ...] | None
    encoded_left_out: str | None
    logits: Comparison | None
    logits_left_out: str | None
    not_built: tuple[str, ...]
    unused: tuple[str, ...]
    drawn: tuple[str, ...]
    notes: tuple[str, ...]
    blueprint: Blueprint = field(repr=False)
    task: Task = field(repr=False)
    exported: Manifest = field(repr=False)
    widened: tuple[str, ...] = field(repr=False)
    num_adapters: int = field(repr=False)

    @property
    def good(self) -> bool:
        """Whether no comparison has found a difference."""
        is_same = not (self.different or self.saved_different or self.adapter_different or self.encoded_different)
        return is_same and (self.logits is None or self.logits.agree())


def differences(expected: Manifest, actual: list[Manifest]) -> tuple[str, ...]:
    """Names that differ between ``expected`` and any of ``actual``."""
    return tuple(dict.fromkeys(name for manifest in actual for name in expected.differences(manifest)))


def verify(
    folder: Path,
    options: BuildOptions,
    *,
    dtype: torch.dtype | None = None,
    against: Path | None = None,
    num_tokens: int = 32,
    save: Path | None = None,
    adapter: Path | None = None,
    on_event: OnEvent,
) -> Verdict:
    """Check everything that needs no processes, then start the ranks and collect their results.

    Args:
        folder: a checkpoint.
        options: options of the build, on "cpu" or "cuda". The smallest world of the mesh is started. Head and dtype are
            replaced. A composite has its tower if that can be built here, but none for a "hybrid" model.
        dtype: the dtype of the model and the export. None: the dtype of the checkpoint. If the checkpoint has several
            dtypes, the model has the widest, and each tensor is exported in its dtype in the files.
        against: another folder to compare the export with.
        num_tokens: the length of the sequences for logits; 0: no logits.
        save: a folder to write with ``save_hf_checkpoint`` and to compare too. It must be none of the folders above.
        adapter: a PEFT folder. Its adapters are added to the model and exported again, and logits are compared with
            logits of ``peft``.
        on_event: called with the reports of ranks.

    Raises:
        BridgeError: the checkpoint cannot be read, built, loaded or exported, or was changed meanwhile.
    """
    from mcore_bridge.factory.blueprint import make_blueprint

    given = require_supported(folder).provenance
    sources = SourceFolders.of(*(given_path(path) for path in (folder, against, adapter) if path is not None))
    if save is not None:
        sources.require_apart(save := target_of(save))
    checkpoint = open_folder(folder)
    dtypes = {tensor.dtype for tensor in checkpoint.values() if tensor.is_floating_point()}
    vision = "text_only" if options.model == "hybrid" else _vision(given)
    options = replace(options, dtype=dtype or widest(dtypes), head=given.head, vision=vision)
    blueprint = make_blueprint(given, options)
    tied = bool(blueprint.gpt_arguments["share_embeddings_and_output_weights"])
    mapping = blueprint.provenance.mapping(tied=tied, mtp=held_mtp_layers(vars(blueprint.config)))
    checkpoint = checkpoint.for_model(mapping)
    names = tuple(name for name in checkpoint if _is_exported(mapping, name))
    task = Task(
        folder=folder,
        options=replace(blueprint.options, device=options.device or "cpu"),
        crossing=_crossing(checkpoint, names, dtype, dtypes),
        against=against or folder,
        names=names,
        num_tokens=num_tokens,
        save=save,
        adapter=adapter,
        sources=sources,
    )
    world_size, device = options.dims.smallest_world, str(task.options.device)
    findings = run_ranks(check_rank, task, world_size=world_size, device=device, on_event=on_event)
    sources.require_unchanged()
    return _verdict(blueprint, task, findings, checkpoint, mapping)


def _verdict(
    blueprint: Blueprint, task: Task, findings: Sequence[RankResult], checkpoint: Source, mapping: WeightMapping
) -> Verdict:
    """The results of all ranks as one."""
    first, exported = findings[0], findings[0].exported
    expected = Manifest(tuple(spec for finding in findings for spec in finding.expected))
    saved = Manifest(tuple(spec for finding in findings for spec in finding.saved))
    drawn = [spec for spec in exported if spec.name not in checkpoint and _is_of_mtp(mapping, spec.name)]
    exported_names = set(task.names)
    encoded = [spec for name in task.names if checkpoint.stored(name).encoding for spec in checkpoint.raw_specs(name)]
    others = [name for name in checkpoint if name not in exported_names]
    adapters = {name for finding in findings for name, is_same in finding.adapters.items() if not is_same}
    return Verdict(
        folder=task.folder,
        model_type=blueprint.provenance.config.model_type,
        tower=bool(blueprint.provenance.tower),
        mesh=task.options.dims,
        ranks=len(findings),
        dtype=blueprint.dtype,
        parameters=sum(spec.numel for spec in exported),
        tensors=len(expected),
        bytes=exported.num_bytes,
        decoded=Counter(held.codec.kind for held in (checkpoint.stored(name).encoding for name in task.names) if held),
        rank_bytes=max(finding.held for finding in findings),
        seconds={phase: max(finding.seconds[phase] for finding in findings) for phase in first.seconds},
        different=differences(Manifest((*expected, *drawn)), [finding.exported for finding in findings]),
        saved_different=None if task.save is None else differences(expected, [saved]),
        adapter_different=None if task.adapter is None else tuple(sorted(adapters)),
        encoded=len(encoded),
        encoded_different=_encoded_different(findings, {spec.name for spec in drawn}),
        encoded_left_out=first.unsent or None,
        logits=first.logits,
        logits_left_out=None if first.logits is not None else first.skipped or "as asked",
        not_built=tuple(filter(mapping.is_not_built, others)),
        unused=tuple(name for name in others if not mapping.is_not_built(name)),
        drawn=tuple(spec.name for spec in drawn),
        notes=tuple(note for _, note in notes_on(blueprint.unread)),
        blueprint=blueprint,
        task=task,
        exported=exported,
        widened=tuple(dict.fromkeys(name for finding in findings for name in finding.widened)),
        num_adapters=len(first.adapters),
    )


def _encoded_different(findings: Sequence[RankResult], drawn: Collection[str]) -> tuple[str, ...] | None:
    """Names that differ between a quantized folder and an export in its format. ``drawn`` are in the export alone."""
    exported = [finding.published for finding in findings if finding.published is not None]
    if not exported:
        return None
    stored = Manifest(tuple(spec for finding in findings for spec in finding.stored))
    return tuple(name for name in differences(stored, exported) if name not in drawn)


def _vision(provenance: Provenance) -> str:
    """ "frozen" if the model is a composite whose tower can be built here, else "text_only"."""
    from mcore_bridge.factory.vision.tower import require_tower

    try:
        require_tower(provenance.whole, "frozen")
    except ConfigError:
        return "text_only"
    return "frozen"


def _is_exported(mapping: WeightMapping, name: str) -> bool:
    """Whether an export yields a tensor of the files. Copies are exported too, although no parameter reads them."""
    return mapping.is_copy(name) or not mapping.is_unused(name)


def _is_of_mtp(mapping: WeightMapping, name: str) -> bool:
    return mapping.is_copy(name) or any(mtp_layer_of(mcore) is not None for mcore in mapping.consumers(name))


def widest(dtypes: set[torch.dtype]) -> torch.dtype:
    """The dtype of a model that can hold every value of a checkpoint.

    Raises:
        CheckpointError: the checkpoint has a dtype in which megatron-core builds no model.
    """
    unknown = dtypes - set(BUILDABLE)
    if unknown or not dtypes:
        raise CheckpointError(
            f"the checkpoint must hold only {[dtype_name(dtype) for dtype in BUILDABLE]}, found "
            f"{sorted(map(dtype_name, unknown or dtypes))}: convert it first"
        )
    return next(iter(dtypes)) if len(dtypes) == 1 else torch.float32


def _crossing(
    checkpoint: Source, names: tuple[str, ...], dtype: torch.dtype | None, dtypes: set[torch.dtype]
) -> Dtypes:
    """The dtype of all exported tensors; if a checkpoint has several, the dtype of each tensor."""
    if dtype is not None or len(dtypes) == 1:
        return dtype or next(iter(dtypes))
    own = {name: checkpoint[name].dtype for name in names if checkpoint[name].is_floating_point()}
    ((common, _),) = Counter(own.values()).most_common(1)
    # One pattern for the most common dtype, since every name is compared with all patterns.
    return {**{name: own_dtype for name, own_dtype in own.items() if own_dtype != common}, "*": common}
