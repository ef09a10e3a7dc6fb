"""Writes the tensors of each rank to the files of a ``torch_dist`` folder, in the process of the rank.

megatron-core's strategy starts processes to write, and each of these processes would run the script of a trainer again.
The files are equal. Its queue of asynchronous saves needs CUDA, and finishes a save only when a trainer asks for it. So
we take its ``AsyncRequest``, and run it in a thread.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mcore_bridge.errors import CheckpointError, describe, grouped_by_rank
from mcore_bridge.weights.transfer.collectives import Group
from mcore_bridge.weights.transfer.quantized_parameters import values_of


class InThisProcess(TorchDistSaveShardedStrategy):
    """megatron-core's strategy for saves, with files that torch writes in this process."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Write this rank's part of a sharded state dict. All ranks call it together."""
        held, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        planner = _Planner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False)
        try:
            save(mcore_to_pyt_state_dict(held), storage_writer=_Writer(checkpoint_dir), planner=planner)
        except CheckpointException as error:  # its text is the tracebacks of all ranks
            causes = {rank: describe(cause) for rank, (cause, _) in error.failures.items()}
            raise CheckpointError(grouped_by_rank([*causes.values()], [*causes])) from None

    def async_save(
        self, sharded_state_dict: Any, checkpoint_dir: str | Path, async_strategy: str | None = None
    ) -> AsyncRequest:
        """Plan a save. All ranks call it together.

        Args:
            async_strategy: without effect.

        Returns:
            A request whose ``async_fn(copies)`` writes this rank's files, and whose first ``finalize_fns`` takes the
            group of all ranks, and writes the metadata. ``preload_fn`` yields the tensors to copy, in order.
        """
        held, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        planner = MCoreSavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False)
        writer = _CopyWriter(checkpoint_dir)
        (_, metadata, _), *_ = save_state_dict_async_plan(mcore_to_pyt_state_dict(held), writer, planner=planner)
        finish = partial(writer.finish_by_all, metadata)
        return AsyncRequest(writer.write, (), [finish], preload_fn=writer.tensors)


class _Planner(MCoreSavePlanner):
    """megatron-core's planner. It makes the values of a parameter in FP8 when they are written, one after the other."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """The values of a tensor, or the bytes of an object."""
        return values_of(object) if isinstance(object, Tensor) else object


class _Writer(FileSystemWriter):
    """torch's writer in one thread, because errors of other threads get lost. A rank without data makes no file."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if plan.items:
            try:
                return super().write_data(plan, planner)
            except RuntimeError as error:  # torch's archive hides why the file was not written
                raise error.__context__ or error from None
        nothing: Future[list[WriteResult]] = Future()
        nothing.set_result([])
        return nothing


class _CopyWriter(_Writer):
    """The writer of an asynchronous save: it writes copies of tensors, in the order in which they are made."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, per_thread_copy_ahead=0)  # torch would sort the tensors
        self._plan = SavePlan([])
        self._data: dict[MetadataIndex, Any] = {}
        self._results: list[WriteResult] = []

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Remember the data of each item: a tensor of the model, or the bytes of an object as it is now."""
        self._plan = plan
        self._data = {item.index: planner.resolve_data(item) for item in plan.items}

    def tensors(self) -> Generator[tuple[str, Tensor]]:
        """Yield the values of this rank's tensors in the order of ``write``, and forget the tensors."""
        for item in self._plan.items:
            if item.type != WriteItemType.BYTE_IO:
                yield item.index.fqn, values_of(self._data.pop(item.index))

    def write(self, copies: Iterator[tuple[str, Tensor]]) -> None:
        """Write this rank's file."""
        self._results = self.write_data(self._plan, _Copies(self._data, copies)).wait()
        if next(copies, None) is not None:
            raise CheckpointError("more tensors came than the plan has")

    def finish_by_all(self, metadata: Metadata | None, world: Group) -> None:
        """Write the metadata, on the first rank, from what all ranks have written."""
        results = world.all_gather_object(self._results)
        if world.rank == 0:
            assert metadata is not None
            self.finish(metadata, results)


class _Copies(DefaultSavePlanner):
    """Gives torch one copy after the other."""

    def __init__(self, data: Mapping[MetadataIndex, Any], copies: Iterator[tuple[str, Tensor]]) -> None:
        super().__init__()
        self._data, self._copies = data, copies

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The data of an item: a copy of its tensor, or the bytes of an object."""
        if write_item.type == WriteItemType.BYTE_IO:
            return self._data[write_item.index]
        name, tensor = next(self._copies, ("no tensor", None))
        if name != write_item.index.fqn or tensor is None:
            raise CheckpointError(f"{name} came, expected {write_item.index.fqn}: please report this")
        return tensor
