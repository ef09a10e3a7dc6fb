"""``mcore-bridge verify``: checks that a checkpoint survives a mesh bit by bit, and computes what transformers does."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mcore_bridge.arguments import given_path
from mcore_bridge.commands import text
from mcore_bridge.commands.verify.rank import RankResult, Task, check_rank
from mcore_bridge.config.layer_kinds import held_mtp_layers
from mcore_bridge.errors import CheckpointError, ConfigError
from mcore_bridge.factory.blueprint import BuildOptions
from mcore_bridge.launch.processes import OnEvent, run_ranks
from mcore_bridge.rules.dtypes import Dtypes, dtype_name
from mcore_bridge.rules.mapping import WeightMapping
from mcore_bridge.rules.names import mtp_layer_of
from mcore_bridge.weights.files.atomic_folder import target_of
from mcore_bridge.weights.files.sources import SourceFolders
from mcore_bridge.weights.manifest import Manifest
from mcore_bridge.weights.provenance import head_of, provenance_of
from mcore_bridge.weights.source.source import Source, open_folder

if TYPE_CHECKING:
    from mcore_bridge.factory.blueprint import Blueprint

BUILDABLE = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = 1e-3
"""The largest allowed difference of logits, divided by the largest logit.

Two fp32 implementations of one model differ by rounding in another order; we have seen 1e-7 to 1e-5. With any tensor in
a wrong place, or another rope, norm or activation, the difference is above 1e-2. TransformerEngine multiplies fp32 in
TF32 (10 bits of mantissa), which the tolerance also covers.
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The results of all ranks."""

    blueprint: Blueprint
    task: Task
    findings: tuple[RankResult, ...]
    ignored: tuple[str, ...]
    """Names in the files that no parameter uses, and no save copies."""
    initialised: tuple[str, ...] = ()
    """Names of MTP layers that the files lack. They have random values, and are exported."""
    carried: tuple[str, ...] = ()
    """Names of a composite's other parts, which a save copies."""

    @property
    def exported(self) -> Manifest:
        """The exported tensors."""
        return self.findings[0].exported

    @property
    def expected(self) -> Manifest:
        """The tensors in the files."""
        return Manifest(tuple(spec for finding in self.findings for spec in finding.expected))

    @property
    def different(self) -> tuple[str, ...]:
        """Names whose bits differ between the files and the export on any rank."""
        drawn = (spec for spec in self.exported if spec.name in self.initialised)
        wanted = Manifest((*self.expected, *drawn))
        return differences(wanted, [finding.exported for finding in self.findings])

    @property
    def saved_different(self) -> tuple[str, ...]:
        """Names whose bits differ between the files and the saved folder."""
        if self.task.save is None:
            return ()
        return differences(self.expected, [Manifest(tuple(s for finding in self.findings for s in finding.saved))])

    @property
    def adapters_different(self) -> tuple[str, ...]:
        """Names of the adapter's tensors whose bits differ between the PEFT folder and the export on any rank."""
        return tuple(sorted({name for finding in self.findings for name, same in finding.adapters.items() if not same}))

    @property
    def widened(self) -> tuple[str, ...]:
        """Names of tensors that the model holds in a wider dtype than the files; they leave in that of the files."""
        return tuple(dict.fromkeys(name for finding in self.findings for name in finding.widened))

    @property
    def logits_agree(self) -> bool:
        """Whether logits were left out, or are those of transformers. NaN means that they are not."""
        comparison = self.findings[0].logits
        return comparison is None or comparison.relative <= TOLERANCE

    @property
    def is_good(self) -> bool:
        """Whether nothing differs."""
        is_same = not self.different and not self.saved_different and not self.adapters_different
        return is_same and self.logits_agree


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
        folder: of a checkpoint.
        options: of the build, on "cpu" or "cuda". The smallest world of the mesh is started. Head and dtype are
            replaced. A composite has its tower if that can be built here, but none for a "hybrid" model.
        dtype: of the model and the export. None: that of the checkpoint. If it has several, the model has the widest,
            and each tensor is exported in its own.
        against: another folder to compare the export with.
        num_tokens: the length of the sequences for logits; 0: no logits.
        save: a folder to write with ``save_hf_checkpoint`` and to compare too. It must be none of the others.
        adapter: a PEFT folder. Its adapters are added to the model and exported again, logits are compared with those
            of ``peft``, and a composite has no tower.
        on_event: called with the reports of ranks.

    Raises:
        BridgeError: the checkpoint cannot be read, built, loaded or exported, or was changed meanwhile.
    """
    from mcore_bridge.factory.blueprint import make_blueprint

    sources = SourceFolders.of(*(given_path(path) for path in (folder, against, adapter) if path is not None))
    if save is not None:
        sources.require_apart(save := target_of(save))
    checkpoint = open_folder(folder)
    dtypes = {tensor.dtype for tensor in checkpoint.values() if tensor.is_floating_point()}
    vision = "carried" if adapter is not None or options.model == "hybrid" else _vision(folder)
    options = replace(options, dtype=dtype or widest(dtypes), head=head_of(folder), vision=vision)
    blueprint = make_blueprint(folder, options)
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
    kept = set(names)
    others = [name for name in checkpoint if name not in kept]
    carried = tuple(filter(mapping.is_carried, others))
    ignored = tuple(name for name in others if not mapping.is_carried(name))
    absent = [spec.name for spec in findings[0].exported if spec.name not in checkpoint]
    initialised = tuple(name for name in absent if _is_of_mtp(mapping, name))
    return Verdict(blueprint, task, tuple(findings), ignored, initialised, carried)


def _vision(folder: Path) -> str:
    """ "frozen" if the folder is of a composite whose tower can be built here, else "carried"."""
    from mcore_bridge.factory.vision.tower import require_tower

    try:
        require_tower(provenance_of(folder).whole, "frozen")
    except ConfigError:
        return "carried"
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


def held_specs(verdict: Verdict) -> tuple[str, str]:
    """The number of parameters, and the bytes and dtypes of the model, for the report."""
    specs = verdict.exported.tensors
    numel = sum(spec.numel for spec in specs)
    dtypes = Counter(dtype_name(spec.dtype) for spec in specs)
    kinds = " and ".join(name for name, _ in dtypes.most_common())
    size = text.num_bytes(verdict.exported.num_bytes)
    return f"{text.count(numel)} parameters", f"{size} of {kinds} in {text.plural(len(specs), 'tensor')}"
