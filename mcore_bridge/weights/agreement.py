"""Agreement of the ranks of a replica on a plan, before a byte is sent. Each rank makes the plan for itself.

A plan is reused until something that it depends on changes on any rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, TypedDict, Unpack

from torch import Tensor, nn

from mcore_bridge.arguments import COUNT, FLAG, instance_of, require
from mcore_bridge.config.mesh.alike import Shared, difference, sendable
from mcore_bridge.config.quantization import Quantize
from mcore_bridge.errors import ExportError, describe
from mcore_bridge.machine import uncollected
from mcore_bridge.rules.dtypes import Dtypes
from mcore_bridge.rules.mapping import ExpertFormat, Rules
from mcore_bridge.weights.bound import BoundModel, bind, provenance_on
from mcore_bridge.weights.model_chunks import Models, adapters_in_use, adapters_of, groups_of, whole_config
from mcore_bridge.weights.model_tensors import ranges_of_quantizers
from mcore_bridge.weights.param_sync import gather_pending, heard_by_replicas, require_gatherable
from mcore_bridge.weights.plan.all_to_all import plan_targets
from mcore_bridge.weights.plan.engine_map import EngineMap
from mcore_bridge.weights.plan.export_plan import ExportPlan
from mcore_bridge.weights.plan.gather import plan_export
from mcore_bridge.weights.plan.inventory import Inventory
from mcore_bridge.weights.plan.target import EngineRank, Target
from mcore_bridge.weights.provenance import HF, Provenance, identity
from mcore_bridge.weights.sent.encoding import encode_shards
from mcore_bridge.weights.sent.merging import with_squares
from mcore_bridge.weights.source.weight_format import PLAIN, WeightFormat, weight_format
from mcore_bridge.weights.transfer.collectives import Group
from mcore_bridge.weights.transfer.endpoints import Held
from mcore_bridge.weights.transfer.failures import raise_failures
from mcore_bridge.weights.transfer.program import Program


@dataclass(frozen=True, slots=True)
class _Kept:
    """A plan, its number (equal on every rank), and the fingerprint of everything on this rank that it depends on."""

    fingerprint: object
    number: int
    program: Program
    guest_program: Callable[[int], Program]
    targets: tuple[Target, ...]


_plans: weakref.WeakKeyDictionary[nn.Module, tuple[_Kept, ...]] = weakref.WeakKeyDictionary()
_NUM_PLANS = 4  # plans that are kept for a model: one for a sync, one for a save, ...


@dataclass(frozen=True, slots=True)
class Export:
    """An export that is ready to run: the plan, which all ranks of ``group`` have, and the tensors of this rank."""

    program: Program
    group: Group
    bound: BoundModel
    guest_program: Callable[[int], Program]
    """The program of each guest, by its number."""
    format: WeightFormat
    """The format in which weights leave."""
    held: Held
    """What this rank sends."""
    targets: tuple[Target, ...]
    """The targets of all ranks of ``group``."""


class Only(NamedTuple):
    """What an export takes of the models; by default all weights, without adapters.

    Attributes:
        adapters: whether to export only the adapters in use.
        tensors: tensors by canonical name, to export only these, in place of the tensors of the models.
    """

    adapters: bool = False
    tensors: Mapping[str, Tensor] | None = None


EVERYTHING = Only()


class Options(TypedDict, total=False):
    """The optional arguments of ``agree_on_plan``."""

    expert_format: ExpertFormat | None
    bucket_bytes: int | None
    target: Target | Exception
    dtype: Dtypes
    merged: bool | None
    quantize: Quantize
    only: Only
    guests: tuple[Target, ...]
    shared: Shared


def unless(problem: str, target: Target) -> Target | Exception:
    """The target of a rank, or the error for all ranks if this rank cannot export because of ``problem``."""
    return ExportError(problem) if problem else target


def open_export(models: Models, hf: HF | None, head: str, **options: Unpack[Options]) -> Export:
    """Prepare an export: agree on a plan, then gather parameters that are pending.

    The order matters. Replicas gather together, so a replica that cannot export must inform the other replicas before
    they begin.

    Args:
        models, hf, head, options: as for ``agree_on_plan``.

    Raises:
        ExportError: on every rank, as for ``agree_on_plan``; or if a gather would not reach the parameters.
        TargetError: on every rank, as for ``agree_on_plan``.
    """
    return with_codes(open_plain(models, hf, head, **options))


Look = Callable[[Held], object]
"""What a rank does with its tensors while it would wait for other ranks."""


def open_plain(
    models: Models, hf: HF | None, head: str, look: Look | None = None, **options: Unpack[Options]
) -> Export:
    """``open_export`` up to the codes and scales of weights that leave encoded: ``with_codes`` adds them.

    Args:
        look: called with the tensors of this rank before the ranks communicate. It must not raise.
    """
    with heard_by_replicas(models):
        proposal = propose(models, hf, head, **options)
        if look is not None and proposal.bound is not None:
            look(Held(proposal.bound.tensors, proposal.bound.merges))
        export = proposal.agree()
        require_gatherable(models, export.group)
    gather_pending(models)
    bound = export.bound
    return replace(export, held=Held(bound.tensors, with_squares(export.group, bound.merges, bound.tensors)))


def with_codes(export: Export) -> Export:
    """Make ready what the ranks send of encoded weights. All ranks call it together.

    Raises:
        ExportError: on every rank, as for ``open_export``.
    """
    trained = partial(ranges_of_quantizers, export.bound.chunks)
    return replace(export, held=encode_shards(export.program, export.group, export.held, export.format, trained))


def agree_on_plan(models: Models, hf: HF | None, head: str, **options: Unpack[Options]) -> Export:
    """Agree with the group on a plan.

    If nothing has changed, this takes one small collective; otherwise three. No weight is sent, and pending parameters
    stay pending.

    Args:
        models, hf, head, options: as for ``propose``.

    Raises:
        ExportError, TargetError: as ``Proposal.agree``.
    """
    return propose(models, hf, head, **options).agree()


@dataclass(frozen=True, slots=True)
class Proposal:
    """The export that one rank proposes to its group."""

    group: Group
    bound: BoundModel | None
    provenance: Provenance | None
    error: str
    """Why this rank cannot export; empty if it can."""
    given: dict[str, object]
    """The arguments that must be equal on all ranks."""
    bucket_bytes: int | None
    target: Target
    guests: tuple[Target, ...]
    format: WeightFormat

    @uncollected()
    def agree(self) -> Export:
        """Agree with the group on a plan.

        Raises:
            ExportError: on every rank, when any rank cannot export, or their plans do not fit together.
            TargetError: on every rank, when the model cannot be cut for the target of some rank.
        """
        group, bound, given = self.group, self.bound, self.given
        size = group.rank, group.size, group.num_stages
        fingerprint = (repr(given), self.target, self.guests, *size, bound and bound.fingerprint())
        plans = _plans.get(bound.chunks[0], ()) if bound else ()
        fits = [not self.error and plan.fingerprint == fingerprint for plan in plans]
        index = group.first_in_common(fits, _NUM_PLANS, plans[0].number if plans else 0)
        kept = None if index is None else plans[index]
        if kept is None:
            of_bound = (bound.mapping.rules, bound.inventory()) if bound else ()
            given = given | ({"hf": identity(self.provenance)} if bound and self.provenance else {})
            own = _Answer(self.error, sendable(given), self.bucket_bytes, self.target, group.num_stages, *of_bound)
            answers = group.all_gather_object((own, plans[0].number if plans else 0))
            programs = _agreed(group, bound, [answer for answer, _ in answers], self.guests, self.format)
            targets = tuple(answer.target for answer, _ in answers)
            kept = _Kept(fingerprint, 1 + max(number for _, number in answers), *programs, targets)
            assert bound is not None
            _plans[bound.chunks[0]] = (kept, *plans)[:_NUM_PLANS]
        assert bound is not None
        held = Held(bound.tensors, bound.merges)
        return Export(kept.program, group, bound, kept.guest_program, self.format, held, kept.targets)


@uncollected()
def propose(
    models: Models,
    hf: HF | None,
    head: str,
    *,
    expert_format: ExpertFormat | None = None,
    bucket_bytes: int | None = None,
    target: Target | Exception = "everything",
    dtype: Dtypes = None,
    merged: bool | None = None,
    quantize: Quantize = None,
    only: Only = EVERYTHING,
    guests: tuple[Target, ...] = (),
    shared: Shared = MappingProxyType({}),
) -> Proposal:
    """Prepare on this rank what its group agrees on. It raises nothing of which other ranks have to hear.

    Args:
        models, hf, head, expert_format, bucket_bytes, target, dtype, merged, quantize: as for ``iter_hf_weights``. If
            the target is an error, this rank cannot export, and every rank raises the error.
        only: what of the models to export.
        guests: targets of receivers that are no ranks of the group. They hold nothing, and come after its ranks.
        shared: further arguments that must be equal on all ranks.
    """
    group = Group.of_replica(groups_of(models))
    bound, provenance, error, form = None, None, "", PLAIN
    given: dict[str, object] = {"bucket_bytes": bucket_bytes, "merged": merged, **shared}
    try:
        require(
            ExportError,
            bucket_bytes=(bucket_bytes, COUNT.or_none()),
            merged=(merged, FLAG.or_none()),
        )
        provenance = provenance_on(models, hf, head)
        adapters = adapters_of(models) if only.adapters else None
        bound = bind(models, provenance, expert_format=expert_format, merged=merged, adapters=adapters)
        bound = bound if only.tensors is None else replace(bound, tensors=only.tensors, is_part=True)
        form = weight_format(quantize, provenance.folder)
        given |= {
            "head": provenance.head,
            "expert_format": expert_format or provenance.expert_format,
            "quantize": form.digest,
            "adapters": adapters_in_use(models) if merged or only.adapters else None,
        }
        if isinstance(target, Exception):
            raise target
        require(ExportError, target=(target, _TARGET))
        error = bound.problem_of(dtype)
    except Exception as failure:  # also errors of files: other ranks must be informed
        error, target = describe(failure), "nothing"
    return Proposal(group, bound, provenance, error, given, bucket_bytes, target, guests, form)


_TARGET = instance_of(
    '"everything", "nothing", "share", an EngineRank or an EngineMap',
    *(str, EngineRank, EngineMap),
    advice="pass one of them",
)


class _Answer(NamedTuple):
    """The message of one rank to the other ranks before they plan."""

    error: str
    given: Shared
    bucket_bytes: int | None
    target: Target
    num_stages: int
    rules: Rules | None = None
    inventory: Inventory | None = None


def _agreed(
    group: Group,
    bound: BoundModel | None,
    answers: Sequence[_Answer],
    guests: tuple[Target, ...],
    form: WeightFormat,
) -> tuple[Program, Callable[[int], Program]]:
    """Make the plan on this rank, and check that the plans of all ranks fit together."""
    try:
        plans_of = _planned(bound, answers, guests, form)
        stages = {answer.num_stages for answer in answers}
        program = Program(plans_of(group.rank), group.rank, stages.pop() if len(stages) == 1 else 1)

        def guest_program(number: int) -> Program:
            return Program(plans_of(group.size + number), group.size + number)

        balance = program.balance()
        if group.rank == 0:
            balance += sum(guest_program(number).balance() for number in range(len(guests)))
    except Exception:  # on every rank alike; if not, the other ranks must be informed
        group.sums_to_zero(1)
        raise
    if not group.sums_to_zero(balance):
        raise ExportError(
            "the ranks made plans that do not fit together, or another rank made none, so nothing was sent. Run one "
            "version of Python and of mcore_bridge on all ranks; if you do, please report this, with the mesh"
        )
    return program, guest_program


def _planned(
    bound: BoundModel | None,
    answers: Sequence[_Answer],
    guests: tuple[Target, ...],
    form: WeightFormat,
) -> Callable[[int], Sequence[ExportPlan]]:
    """The plans for all receivers, with the parts that a rank needs, by rank. Guests are the last ranks."""
    raise_failures([answer.error for answer in answers])
    assert bound is not None
    targets = [*(answer.target for answer in answers), *guests]
    if problem := difference([answer.given for answer in answers], ExportError):
        raise problem
    if any(answer.rules != bound.mapping.rules for answer in answers):
        raise ExportError(
            "the ranks name weights by different rules; pass the same hf, head and expert_format on each rank"
        )
    inventories = [answer.inventory for answer in answers if answer.inventory]
    if not any(inventory.held for inventory in inventories):
        raise ExportError("no rank of the group holds a tensor to export: give targets of adapters that the model has")
    inventories += [Inventory(dict.fromkeys(inventories[0].ranks, 0), ())] * len(guests)
    arguments = bound.mapping, bound.axes, whole_config(bound.chunks[0]).num_layers, inventories
    bucket_bytes, encode = answers[0].bucket_bytes, partial(form.entries, bound.mapping)
    if set(targets) == {"everything"} and not guests:
        plan = plan_export(*arguments, bucket_bytes=bucket_bytes, encode=encode)
        return lambda rank: [plan]
    return plan_targets(*arguments, targets, bucket_bytes=bucket_bytes, guests=len(guests), encode=encode).plans_of
