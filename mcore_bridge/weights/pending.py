"""Parameters that are up to date on one replica each: ``overlap_param_gather`` has the next forward gather the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from mcore_bridge.errors import ExportError
from mcore_bridge.weights.bound import Models
from mcore_bridge.weights.names import unwrap

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel


def is_pending(models: Models) -> bool:
    """Whether a step of the distributed optimizer may have left parameters that only other replicas have."""
    return any(map(_awaits, _wrappers(models)))


def gather_pending(models: Models) -> None:
    """Gather them now. A collective of all replicas, on which ``is_pending`` is the same.

    Raises:
        ExportError: where parameters lie elsewhere by now, and what is gathered would not reach them.
    """
    for ddp in filter(_awaits, _wrappers(models)):
        for bucket in (bucket for group in _groups(ddp) for bucket in group.buckets):
            own = bucket.param_data.untyped_storage().data_ptr()
            if any(parameter.untyped_storage().data_ptr() != own for parameter in bucket.params):
                raise ExportError(
                    "parameters were moved before replicas had gathered what a step changed, and are stale: call "
                    "start_param_sync(force_sync=True) of each model before they are offloaded"
                )
        ddp.start_param_sync(force_sync=True)


def _groups(ddp: DistributedDataParallel) -> Sequence[Any]:
    return [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]


def _awaits(ddp: DistributedDataParallel) -> bool:
    return any(not group.param_gather_dispatched or group.param_gather_handle is not None for group in _groups(ddp))


def _wrappers(models: Models) -> Iterator[DistributedDataParallel]:
    """megatron-core's DDP around chunks, where it leaves parameters to the next forward.

    It is found where the caller has unwrapped a chunk, too, since the hooks that it has on the chunk know it.
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
        yield from (each for each in wrappers.values() if each.ddp_config.overlap_param_gather)
