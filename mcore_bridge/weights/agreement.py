"""The ranks of a replica agree on a plan, each of which makes it for itself, before they move a byte.

A plan is kept until anything that it rests on has changed on any rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from mcore_bridge.errors import ExportError, describe
from mcore_bridge.rules.mapping import Dialect, Rules
from mcore_bridge.weights.bound import BoundModel, Models, bind, chunks_of, provenance_on
from mcore_bridge.weights.gc_paused import uncollected
from mcore_bridge.weights.param_sync import gather_pending, heard_by_replicas, require_gatherable
from mcore_bridge.weights.plan.all_to_all import plan_targets
from mcore_bridge.weights.plan.export_plan import ExportPlan
from mcore_bridge.weights.plan.gather import plan_export
from mcore_bridge.weights.plan.inventory import Inventory
from mcore_bridge.weights.plan.target import Target
from mcore_bridge.weights.provenance import HF
from mcore_bridge.weights.transfer.collectives import Group
from mcore_bridge.weights.transfer.failures import raise_failures
from mcore_bridge.weights.transfer.program import Program

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


@dataclass(frozen=True, slots=True)
class _Kept:
    """A plan, its number, which is the same on every rank, and what it rests on on this one."""

    fingerprint: object
    number: int
    program: Program


_plans: weakref.WeakKeyDictionary[nn.Module, tuple[_Kept, ...]] = weakref.WeakKeyDictionary()
_NUM_PLANS = 4  # that are kept for a model: a sync, a save, ...


@dataclass(frozen=True, slots=True)
class Export:
    """A model ready to be exported: the same plan on every rank of ``group``, and what this rank holds."""

    program: Program
    group: Group
    bound: BoundModel


def open_export(
    models: Models,
    hf: HF | None,
    head: str,
    *,
    dialect: Dialect | None = None,
    bucket_bytes: int | None = None,
    target: Target = "everything",
    problem: str = "",
) -> Export:
    """Make ready for an export: agree on a plan, then gather what replicas have yet to gather.

    The order counts. Replicas gather together, so one that cannot export must tell the others before they begin.

    Args:
        models, hf, head, dialect, bucket_bytes, target, problem: as for ``agree_on_plan``.

    Raises:
        ExportError: on every rank, as for ``agree_on_plan``; or where a gather would not reach the parameters.
        TargetError: on every rank, as for ``agree_on_plan``.
    """
    with heard_by_replicas(models):
        export = agree_on_plan(
            models, hf, head, dialect=dialect, bucket_bytes=bucket_bytes, target=target, problem=problem
        )
        require_gatherable(models, export.group)
    gather_pending(models)
    return export


def agree_on_plan(
    models: Models,
    hf: HF | None,
    head: str,
    *,
    dialect: Dialect | None = None,
    bucket_bytes: int | None = None,
    target: Target = "everything",
    problem: str = "",
) -> Export:
    """Agree with the group on a plan: one small collective when nothing has changed; else an exchange, and another.

    No weight moves, and what replicas have yet to gather stays so.

    Args:
        models, hf, head, dialect, bucket_bytes, target: as for ``iter_hf_weights``.
        problem: why this rank cannot export, if its caller knows it: what every rank is to raise.

    Raises:
        ExportError: on every rank, when any rank cannot export, or their plans do not fit together.
        TargetError: on every rank, when the model cannot be cut as the target of any rank says.
    """
    first = chunks_of(models)[0]
    group = Group.of_replica(first.pg_collection)
    bound, error = None, problem
    try:
        if bucket_bytes is not None and not (isinstance(bucket_bytes, int) and bucket_bytes > 0):
            raise ExportError(f"bucket_bytes must be a number of bytes above 0, or None, found {bucket_bytes!r}")
        bound = bind(models, provenance_on(models, hf, head), dialect=dialect)
    except Exception as failure:  # of files, too: the others must hear of it
        error = describe(failure)
    fingerprint = (bucket_bytes, target, group.rank, group.size, group.num_stages, bound and bound.fingerprint())
    plans = _plans.get(first, ())
    fits = [not error and each.fingerprint == fingerprint for each in plans]
    place = group.first_in_common(fits, _NUM_PLANS, plans[0].number if plans else 0)
    kept = None if place is None else plans[place]
    if kept is None:
        found = (bound.mapping.rules, bound.inventory()) if bound else ()
        answer = _Answer(error, bucket_bytes, target, group.num_stages, *found)
        answers = group.all_gather_object((answer, plans[0].number if plans else 0))
        program = _agreed(group, bound, first, [each for each, _ in answers])
        kept = _Kept(fingerprint, 1 + max(number for _, number in answers), program)
        _plans[first] = (kept, *plans)[:_NUM_PLANS]
    assert bound is not None
    return Export(kept.program, group, bound)


class _Answer(NamedTuple):
    """What a rank tells the others before they plan."""

    error: str
    bucket_bytes: int | None
    target: Target
    num_stages: int
    rules: Rules | None = None
    inventory: Inventory | None = None


def _agreed(group: Group, bound: BoundModel | None, chunk: GPTModel, answers: Sequence[_Answer]) -> Program:
    """Plan as all ranks do, each for itself, and see whether what they planned fits together."""
    try:
        with uncollected():
            made = _planned(bound, chunk, answers, group.rank)
            stages = {each.num_stages for each in answers}
            program = Program(made, group.rank, stages.pop() if len(stages) == 1 else 1)
            balance = program.balance()
    except Exception:  # the same on every rank, or else the others must hear of it
        group.sums_to_zero(1)
        raise
    if not group.sums_to_zero(balance):
        raise ExportError(
            "the ranks made plans that do not fit together, or another rank made none, so nothing was sent: run one "
            "version of Python and of mcore_bridge on all of them; if that is so, please report it, with the mesh"
        )
    return program


def _planned(bound: BoundModel | None, chunk: GPTModel, answers: Sequence[_Answer], rank: int) -> Sequence[ExportPlan]:
    raise_failures([answer.error for answer in answers])
    assert bound is not None
    sizes, targets = [answer.bucket_bytes for answer in answers], [answer.target for answer in answers]
    if len(set(sizes)) > 1:
        raise ExportError(f"bucket_bytes differs between ranks: {sizes}; pass one value")
    if any(answer.rules != bound.mapping.rules for answer in answers):
        raise ExportError("the ranks name weights by different rules; pass the same hf, head and dialect on each")
    inventories = [answer.inventory for answer in answers if answer.inventory]
    arguments = bound.mapping, bound.axes, chunk.config.num_layers, inventories
    if set(targets) == {"everything"}:
        return [plan_export(*arguments, bucket_bytes=sizes[0])]
    return plan_targets(*arguments, targets, bucket_bytes=sizes[0]).plans_of(rank)
