"""Parameters that are up to date on one replica each: ``overlap_param_gather`` has the next forward gather the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from mcore_bridge.errors import ExportError
from mcore_bridge.weights.bound import Models, chunks_of
from mcore_bridge.weights.model_tensors import unwrap
from mcore_bridge.weights.transfer.collectives import Group
from mcore_bridge.weights.transfer.failures import require_all

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel


def is_pending(models: Models) -> bool:
    """Whether a step of the optimizer may have left parameters that only other replicas have.

    It is so before the first forward, too, and between a backward and the next forward: nothing tells when a step was.
    """
    return any(map(_awaits, _wrappers(models)))


def require_gathered(models: Models) -> None:
    """For what does not communicate: raise ``ExportError`` where a gather may be pending."""
    if is_pending(models):
        raise ExportError(
            "replicas may have yet to gather what a step changed, and nothing communicates here: on all of them, call "
            "start_param_sync(force_sync=True) of each model first"
        )


@contextmanager
def heard_by_replicas(models: Models) -> Iterator[None]:
    """What fails in here on all ranks of one replica raises on others, too, if they would wait for it to gather.

    Raises:
        ExportError: on all ranks of these.
    """
    error = None
    try:
        yield
    except Exception as failure:
        error = failure
    if not _all_gather(models, error is None) and error is None:
        raise ExportError("another replica, with which this one is to gather parameters, cannot export, and says why")
    if error is not None:
        raise error


def _all_gather(models: Models, is_well: bool) -> bool:
    """Whether all replicas are well that are about to gather."""
    if not list(_wrappers(models)):  # a setting of the trainer, and so the same on every rank
        return True
    groups = chunks_of(models)[0].pg_collection
    somewhere = Group.of_replica(groups).max(is_pending(models))  # a stage may be frozen
    return not somewhere or Group.across_replicas(groups).all_true(is_well)


def require_gatherable(models: Models, group: Group) -> None:
    """See that what is gathered will reach the parameters. A collective of all ranks of ``group``.

    Raises:
        ExportError: on all of them, where it would not on any.
    """
    wrappers = list(_wrappers(models))
    if wrappers:
        problem = next((message for message in map(_problem, filter(_awaits, wrappers)) if message), "")
        require_all(group, problem)


def gather_pending(models: Models) -> None:
    """Gather them now. A collective of all replicas."""
    for ddp in filter(_awaits, _wrappers(models)):  # none where a stage is frozen
        dispatched = [each.param_gather_dispatched for each in _groups(ddp)]
        ddp.start_param_sync(force_sync=True)
        for each, was in zip(_groups(ddp), dispatched, strict=True):
            each.param_gather_dispatched = was  # the step may be still to come, and the next forward must gather then


def _problem(ddp: DistributedDataParallel) -> str:
    """Why a gather would not reach the parameters, if so."""
    hint = "call start_param_sync(force_sync=True) of each model right after the step, and before it is offloaded"
    for bucket in (bucket for group in _groups(ddp) for bucket in group.buckets):
        if bucket.param_data is None:
            return f"this optimizer gathers parameters where gradients are, which an export must not touch: {hint}"
        own = bucket.param_data.untyped_storage().data_ptr()
        if not own or any(parameter.untyped_storage().data_ptr() != own for parameter in bucket.params):
            return f"parameters were moved before replicas had gathered what a step may have changed: {hint}"
    return ""


def _groups(ddp: DistributedDataParallel) -> Sequence[Any]:
    return [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]


def _awaits(ddp: DistributedDataParallel) -> bool:
    return any(not group.param_gather_dispatched or group.param_gather_handle is not None for group in _groups(ddp))


def _wrappers(models: Models) -> Iterator[DistributedDataParallel]:
    """megatron-core's DDP around chunks, where it leaves parameters to the next forward.

    It is found where the caller has unwrapped a chunk, too, as long as its hooks are on the chunk, since they know it.
    """
    from megatron.core.distributed import DistributedDataParallel

    for model in [models] if isinstance(models, nn.Module) else models:
        around, bare = model, unwrap(model)
        hooks = bare._forward_pre_hooks.values()
        found: list[Any] = [cell.cell_contents for hook in hooks for cell in getattr(hook, "__closure__", None) or ()]
        while around is not bare:
            found.append(around)
            around = found[-1].module
        wrappers = {id(each): each for each in found if isinstance(each, DistributedDataParallel)}
        yield from (each for each in wrappers.values() if each.use_forward_hook)
