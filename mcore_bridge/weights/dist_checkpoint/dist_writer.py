"""Writes the tensors of each rank to the files of a ``torch_dist`` folder, in the process of the rank.

megatron-core's strategy starts processes to write, and each of these processes would run the script of a trainer again.
The files are equal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mcore_bridge.weights.transfer.quantized_parameters import values_of


class InThisProcess(TorchDistSaveShardedStrategy):
    """megatron-core's strategy for saves, with files that torch writes in this process."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Write this rank's part of a sharded state dict. All ranks call it together."""
        held, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        planner = _Planner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False)
        save(mcore_to_pyt_state_dict(held), storage_writer=_Writer(checkpoint_dir), planner=planner)


class _Planner(MCoreSavePlanner):
    """megatron-core's planner. It makes the values of a parameter in FP8 when they are written, one after the other."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """The values of a tensor, or the bytes of an object."""
        return values_of(object) if isinstance(object, Tensor) else object


class _Writer(FileSystemWriter):
    """torch's writer in one thread, because errors of other threads get lost. A rank without data makes no file."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if plan.items:
            return super().write_data(plan, planner)
        nothing: Future[list[WriteResult]] = Future()
        nothing.set_result([])
        return nothing
