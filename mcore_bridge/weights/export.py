"""mcore to HF: agree on a plan, run it, yield HF tensors. The one iterator that everything consumes.

Nothing communicates until the first ``next``. A plan is kept until anything that it rests on has changed on any rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from mcore_bridge.errors import ExportError, told
from mcore_bridge.rules.mapping import Dialect, Rules
from mcore_bridge.weights.bound import BoundModel, Models, bind, chunks_of, noted
from mcore_bridge.weights.dtypes import Dtypes, problem_of, wanted_dtype
from mcore_bridge.weights.gc_paused import uncollected
from mcore_bridge.weights.param_sync import gather_pending, heard_by_replicas, require_gatherable
from mcore_bridge.weights.plan.all_to_all import plan_targets
from mcore_bridge.weights.plan.export_plan import ExportPlan
from mcore_bridge.weights.plan.gather import plan_export
from mcore_bridge.weights.plan.inventory import Inventory
from mcore_bridge.weights.plan.target import Target
from mcore_bridge.weights.provenance import HF
from mcore_bridge.weights.transfer.collectives import Group
from mcore_bridge.weights.transfer.executor import raise_failures, run_program
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


def iter_hf_weights(
    models: Models,
    *,
    hf: HF | None = None,
    head: str = "lm",
    dtype: Dtypes = None,
    device: torch.device | str | None = None,
    dialect: Dialect | None = None,
    bucket_bytes: int | None = None,
    target: Target = "everything",
    copy: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every HF tensor, whole, on every rank: same names, order, shapes and bits; or what ``target`` says.

    All ranks of a model replica (tensor, expert and pipeline ranks) iterate together, also those that get nothing;
    replicas do so on their own. Only where megatron-core's DDP has ``overlap_param_gather`` do all of them begin
    together, from the first export on: what a step of the optimizer may have left for the next forward is gathered, and
    where one of them cannot begin, none does. Tensors are detached copies that the caller may keep, unless ``copy`` is
    False. A rank may stop early: close the generator (or let go of it), and it goes on sending what the others still
    need before ``close`` returns; but it must have begun, with the first ``next``.

    Args:
        models: this rank's chunks, wrapped or not; parameters may be on CPU while the group is NCCL.
        hf, head: for models that ``build_model`` did not make: their HF config or folder, and their head.
        dtype: cast to this on the way out; by default each tensor has its own.
        device: where tensors are yielded; by default where the group communicates.
        dialect: "split" gives each routed expert a tensor of its own, "fused" those of a layer one for all; None is as
            the checkpoint has it that the model came from.
        bucket_bytes: of the messages that are on their way to a rank. An export takes at most three times this, beside
            the model and the largest tensor (or what engines fuse of a layer): pipeline stages take turns, and experts
            go in shifts, where all at once would take more. None is what takes 2 GB in all, or half as much again as
            the largest tensor. What the caller still holds of the tensor before comes to it where buckets are smaller
            than 512 MB, and a few KB for each rank. ``mcore-bridge plan`` says how much.
        target: what this rank gets, whatever others get: "everything"; "nothing", so that it only sends; or an
            ``EngineRank``, whose slices alone travel to it. ``mb.engine_ranks`` makes those of an engine.
        copy: False yields tensors that arrived whole, such as those of most experts, as views of what arrived: valid
            until the next one is asked for, and only to be read. They take less memory, and the next message waits.

    Raises:
        ExportError: on every rank of the group, when any of them fails; names rank and parameter.
        MappingError: on every rank of the group, when what they hold together is no whole model.
        TargetError: on every rank of the group, when the model cannot be cut as the target of any of them says.
    """
    options: dict[str, Any] = {"dialect": dialect, "bucket_bytes": bucket_bytes, "target": target}
    with heard_by_replicas(models):
        export = open_export(models, hf, head, **options, problem=problem_of(dtype))
        require_gatherable(models, export.group)
    gather_pending(models)
    with closing(run_program(export.program, export.group, export.bound.tensors, lend=not copy)) as pairs:
        if dtype is None and device is None:
            yield from pairs
        for name, tensor in pairs:
            try:
                found = tensor.to(device or tensor.device, wanted_dtype(name, tensor.dtype, dtype))
            except Exception as problem:  # such as no memory: it fails the export, on every rank
                pairs.throw(problem)
            yield name, found


def to_hf_state_dict(
    models: Models,
    *,
    hf: HF | None = None,
    head: str = "lm",
    dtype: Dtypes = None,
    device: torch.device | str | None = None,
    dialect: Dialect | None = None,
    bucket_bytes: int | None = None,
    target: Target = "everything",
) -> dict[str, Tensor]:
    """``iter_hf_weights``, collected: the whole HF state dict on every rank, or what ``target`` says."""
    pairs = iter_hf_weights(
        models, hf=hf, head=head, dtype=dtype, device=device, dialect=dialect, bucket_bytes=bucket_bytes, target=target
    )
    return dict(pairs)


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
    """Agree with the group on a plan: one small collective when nothing has changed; else an exchange, and another.

    Args:
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
        bound = bind(models, noted(models, hf, head), dialect=dialect)
    except Exception as failure:  # of files, too: the others must hear of it
        error = told(failure)
    fingerprint = (bucket_bytes, target, group.rank, group.size, group.num_stages, bound and bound.fingerprint())
    plans = _plans.get(first, ())
    fits = [not error and each.fingerprint == fingerprint for each in plans]
    place = group.first_in_common(fits, _NUM_PLANS, plans[0].number if plans else 0)
    kept = None if place is None else plans[place]
    if kept is None:
        found = (bound.mapping.rules, bound.inventory()) if bound else ()
        answer = _Answer(error, bucket_bytes, target, group.num_stages, *found)
        answers = group.exchange((answer, plans[0].number if plans else 0))
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
        group.adds_up(1)
        raise
    if not group.adds_up(balance):
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
