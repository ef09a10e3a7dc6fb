"""The index of verl's ``delta_sharded``, and its entries, from our conversion tasks.

verl calls two functions of its module ``verl.workers.engine.megatron.delta_export``, and these take their place. verl
finds the changed elements of each shard. We say where each of them is in HF tensors, by arithmetic. verl's own
functions run Megatron-Bridge's converters on copies full of NaN instead.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mcore_bridge.errors import ConfigError
from mcore_bridge.rules.trace import Shape
from mcore_bridge.trainers.conversion_tasks import ConversionTask

if TYPE_CHECKING:
    from mcore_bridge.trainers.megatron_bridge import AutoBridge, Models
    from mcore_bridge.weights.plan.positions import ShardPositions

Slots = list[tuple[str, Shape]]
"""HF tensors, with their whole shapes."""
_INT32 = 1 << 31


@dataclass(frozen=True, eq=False)
class ShardRecord:
    """One parameter in the index, with the attributes that verl reads.

    Attributes:
        megatron_name: its global name.
        spec: verl's ``ShardSpec``: which ranks merge their entries, and whether this rank has any.
        slots: the HF tensors of the entries, equal on all ranks that merge them.
        numbers: for each HF tensor of this rank's shard, its index in ``slots``.
        positions: where the elements of this rank's shard are, or None.
    """

    megatron_name: str
    spec: Any
    slots: Slots
    numbers: tuple[int, ...]
    positions: ShardPositions | None
    _module: nn.Module | None
    _leaf: str

    @property
    def param(self) -> Tensor | None:
        """This rank's shard, as it is now; None on ranks without one."""
        return None if self._module is None else getattr(self._module, self._leaf)


def build_export_index(bridge: AutoBridge, megatron_model: Models, slot_cache: object = None) -> list[ShardRecord]:
    """The parameters of the model in one order on all ranks, each with the ranks that merge its entries.

    All ranks call it together, once.

    Args:
        bridge: ours.
        megatron_model: this rank's chunks, wrapped or not.
        slot_cache: without effect.

    Raises:
        ConfigError: an HF tensor has more elements than verl's positions of 32 bits can number.
        ExportError: on every rank, as ``get_conversion_tasks``.
    """
    tasks = [*bridge.get_conversion_tasks(megatron_model)]
    if large := [spec.name for task in tasks for spec in task.hf if math.prod(spec.shape) >= _INT32]:
        raise ConfigError(
            f"delta_sharded numbers the elements of an HF tensor with 32 bits, and {len(large)} tensors have more than "
            f"{_INT32 - 1} elements, such as {large[0]}: set another checkpoint_engine.backend"
        )
    return [_record(task) for task in tasks]


def mcore_hf_delta_entry(
    rec: ShardRecord, _place: object, lidx: Tensor, lval: Tensor, slot_cache: object
) -> tuple[Slots, str, Tensor, Tensor, Tensor]:
    """The changed elements of a shard as an entry of verl.

    Args:
        rec: a record of the index.
        lidx, lval: flat positions in this rank's shard, int64, and the new values.
        _place, slot_cache: without effect.

    Returns:
        The slots; the dtype; the number of elements in each slot; their flat positions in the slots, int32, one slot
        after the other; and their values.
    """
    counts = torch.zeros(len(rec.slots), dtype=torch.int64)
    pieces: list[list[tuple[Tensor, Tensor]]] = [[] for _ in rec.slots]
    if rec.positions is not None and lidx.numel():
        for number, chosen, hf in rec.positions.of_elements(lidx):
            counts[rec.numbers[number]] += len(chosen)
            pieces[rec.numbers[number]].append((hf.to(torch.int32), lval[chosen]))
    in_order = [piece for of_slot in pieces for piece in of_slot]
    indices = torch.cat([*(hf for hf, _ in in_order), torch.empty(0, dtype=torch.int32, device=lval.device)])
    values = torch.cat([*(value for _, value in in_order), lval[:0]])
    return rec.slots, str(lval.dtype).removeprefix("torch."), counts, indices, values


def _record(task: ConversionTask) -> ShardRecord:
    slots = [(spec.name, spec.shape) for spec in task.hf]
    own = () if task.positions is None else task.positions.hf
    numbers = tuple(slots.index((spec.name, spec.shape)) for spec in own)
    leaf = task.param_name.rpartition(".")[2]
    return ShardRecord(task.global_param_name, _spec(task), slots, numbers, task.positions, task.megatron_module, leaf)


def _spec(task: ConversionTask) -> Any:
    """The ranks that merge entries of a task: all ranks if there are stages, else the ranks that cut its parameter.

    verl sends what the first rank of the world has merged. Of replicas over data parallelism, only the replica of this
    rank has entries; of several stages with one parameter, only the owner. Replicas over tensor parallelism need no
    care, since an element counts in one shard only.
    """
    from megatron.core import parallel_state as mpu

    if task.is_expert:
        group, is_first = mpu.get_expert_tensor_and_model_parallel_group(), mpu.get_expert_data_parallel_rank() == 0
    else:
        group = mpu.get_tensor_model_parallel_group()
        is_first = mpu.get_data_parallel_rank(with_context_parallel=True) == 0
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        group = torch.distributed.group.WORLD
    is_owner = _owns(task, mpu.get_pipeline_model_parallel_rank())
    shape = (0,) if task.param_weight is None else task.shape
    shard_spec: Any = importlib.import_module("verl.workers.engine.spec").ShardSpec
    return shard_spec(full_shape=shape, place=0, gather_group=group, contributes=is_first and is_owner)


def _owns(task: ConversionTask, stage: int) -> bool:
    return task.param_weight is not None and task.pp_rank == stage
