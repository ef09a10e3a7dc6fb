"""How tensors get into the files of a ``torch_dist`` folder: each rank writes its own, itself.

megatron-core's own strategy starts processes for that, one of which runs the script of a trainer again. What they write
is the same.
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
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future


class InThisProcess(TorchDistSaveShardedStrategy):
    """megatron-core's strategy, whose files torch writes in this process."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Write what this rank is to write of a sharded state. All ranks call it together."""
        held, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        planner = MCoreSavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False)
        save(mcore_to_pyt_state_dict(held), storage_writer=_Writer(checkpoint_dir), planner=planner)


class _Writer(FileSystemWriter):
    """torch's, in one thread: what others raise gets lost. A rank that has nothing to write makes no file."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if plan.items:
            return super().write_data(plan, planner)
        nothing: Future[list[WriteResult]] = Future()
        nothing.set_result([])
        return nothing
