"""Gathers pending parameters before an export: with ``overlap_param_gather``, replicas gather them only in the next
forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mcore_bridge.errors import ExportError, LostRankError, MappingError
from mcore_bridge.weights.model_chunks import Models, groups_of, modules_of, unwrap
from mcore_bridge.weights.transfer.collectives import Group
from mcore_bridge.weights.transfer.failures import require_all
from mcore_bridge.weights.transfer.quantized_parameters import memory_of

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel


def is_pending(models: Models) -> bool:
    """Whether some of the newest parameters may be only on other replicas, because of a step of the optimizer.

    This is also True before the first forward, and between a backward and the next forward, since we cannot find out
    whether a step has happened.
    """
    return any(map(_awaits, _wrappers(models)))


def require_gathered(models: Models) -> None:
    """Raise ``ExportError`` if a gather may be pending, for callers that do not communicate."""
    if is_pending(models):
        raise ExportError(
            "a step may have changed parameters that replicas have not gathered yet, and this call does not "
            "communicate: on all replicas, "
            "call start_param_sync(force_sync=True) of each model first"
        )


@contextmanager
def heard_by_replicas(models: Models) -> Iterator[None]:
    """Run a block on all replicas. If it fails on one, raise on all, since a gather would wait for that replica.

    Raises:
        ExportError: on all ranks of replicas that gather from each other.
    """
    error = None
    try:
        yield
    except LostRankError:  # it breaks the connections to all who would wait
        raise
    except Exception as failure:
        error = failure
    if not _all_gather(models, error is None) and error is None:
        raise ExportError(
            "another replica, with which this one must gather parameters, cannot export; see the error of that replica"
        )
    if error is not None:
        raise error


def _all_gather(models: Models, is_well: bool) -> bool:
    """Whether all replicas that are about to gather can do so."""
    if is_well and not list(_wrappers(models)):  # a setting of the trainer, so it is equal on every rank
        return True  # a rank with wrong models has none, and does not know the setting
    groups = groups_of(models)
    somewhere = Group.of_replica(groups).max(is_pending(models))  # a stage may be frozen
    return not somewhere or Group.across_replicas(groups).all_true(is_well)


def require_gatherable(models: Models, group: Group) -> None:
    """Check that a gather will reach the parameters. All ranks of ``group`` call it together.

    Raises:
        ExportError: on all ranks, if the gather would miss the parameters of any rank.
    """
    wrappers = list(_wrappers(models))
    if wrappers:
        problem = next((message for message in map(_problem, filter(_awaits, wrappers)) if message), "")
        require_all(group, problem)


def gather_pending(models: Models) -> None:
    """Gather the parameters now. All replicas call it together."""
    for ddp in filter(_awaits, _wrappers(models)):  # none if a stage is frozen
        dispatched = [group.param_gather_dispatched for group in _groups(ddp)]
        for group in _groups(ddp):
            if group.param_gather_handle is None:
                group.start_param_sync(force_sync=True)
            else:  # the next forward will not gather again, so parameters in FP8 get their transposes now
                group.finish_param_sync(skip_next_bucket_dispatch=True)
        for group, was_dispatched in zip(_groups(ddp), dispatched, strict=True):
            group.param_gather_dispatched = was_dispatched  # a step may still come, and the next forward must gather


def _problem(ddp: DistributedDataParallel) -> str:
    """The reason why a gather would not reach the parameters, or an empty string."""
    hint = "call start_param_sync(force_sync=True) of each model right after the step, and before it is offloaded"
    for bucket in (bucket for group in _groups(ddp) for bucket in group.buckets):
        if bucket.param_data is None:
            return f"this optimizer gathers parameters where gradients are, which an export must not change: {hint}"
        own = bucket.param_data.untyped_storage().data_ptr()
        if not own or any(memory_of(parameter).untyped_storage().data_ptr() != own for parameter in bucket.params):
            return f"parameters were moved before replicas had gathered the changes of a step: {hint}"
    return ""


def _groups(ddp: DistributedDataParallel) -> Sequence[Any]:
    return [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]


def _awaits(ddp: DistributedDataParallel) -> bool:
    return any(not group.param_gather_dispatched or group.param_gather_handle is not None for group in _groups(ddp))


def _wrappers(models: Models) -> Iterator[DistributedDataParallel]:
    """Yield megatron-core's DDP around each chunk, if it gathers parameters only in the next forward.

    This also finds the DDP of an unwrapped chunk, because hooks on the chunk refer to the DDP.
    """
    from megatron.core.distributed import DistributedDataParallel

    try:
        pairs = [(model, unwrap(model)) for model in modules_of(models)]
    except MappingError:  # the ranks agree that these are no models, and nothing is gathered
        return
    for around, bare in pairs:
        hooks = bare._forward_pre_hooks.values()
        objects: list[Any] = [cell.cell_contents for hook in hooks for cell in getattr(hook, "__closure__", None) or ()]
        while around is not bare:
            objects.append(around)
            around = objects[-1].module
        wrappers = {id(value): value for value in objects if isinstance(value, DistributedDataParallel)}
        yield from (wrapper for wrapper in wrappers.values() if wrapper.use_forward_hook)
