"""The files of a ``torch_dist`` folder, written and read by torch's code, one file or parameter at a time.

A parameter consists of one or more *chunks* of the folder's tensors. A chunk is a box with some rows of the parameter.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from mcore_bridge.errors import CheckpointError
from mcore_bridge.weights.dist_checkpoint.folder import CONTENT, VERSION, TorchDistFolder
from mcore_bridge.weights.dist_checkpoint.metadata import unpickled


@dataclass(frozen=True, slots=True)
class ChunkLocation:
    """The chunk of the tensor ``key`` that has ``rows`` (start, stop) of a parameter. Its leading dims have size 1."""

    key: str
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    offset: tuple[int, ...]
    """The index at which the chunk begins."""
    rows: tuple[int, int]
    padded: bool = False
    """Whether the tensor may have more rows than the model needs, for example for a padded vocabulary."""

    def sizes(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The sizes of the chunk, for a parameter of ``shape``."""
        leading = len(self.shape) - len(shape)
        return (*(1,) * leading, self.rows[1] - self.rows[0], *shape[1:])

    def chunk(self, shape: Sequence[int]) -> ChunkStorageMetadata:
        """The chunk in torch's class, for a parameter of ``shape``."""
        return ChunkStorageMetadata(torch.Size(self.offset), torch.Size(self.sizes(shape)))


@dataclass(frozen=True, slots=True)
class LocatedParam:
    """A parameter, and the chunks that it consists of."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[ChunkLocation, ...]


# writing --------------------------------------------------------------------------------------------------------------


def plan_files(units: Iterable[Sequence[LocatedParam]], objects: Sequence[str]) -> tuple[list[SavePlan], Metadata]:
    """Plan the files of a folder: one for each of ``units``, and a last one for the empty ``objects``.

    Returns:
        The plan of each file, and the metadata of the folder.
    """
    plans = [SavePlan([_item(param, location) for param in unit for location in param.chunks]) for unit in units]
    plans.append(SavePlan([WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in objects]))
    return create_default_global_save_plan(plans)


def _item(param: LocatedParam, location: ChunkLocation) -> WriteItem:
    properties = TensorProperties(dtype=param.dtype)
    data = TensorWriteData(location.chunk(param.shape), properties, torch.Size(location.shape))
    return WriteItem(MetadataIndex(location.key, data.chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def file_name(number: int) -> str:
    """The name of the file with this number."""
    return f"__{number}_0.distcp"


def _results(folder: Path, number: int) -> Path:
    """The path of torch's write results for a file, which ``finish`` needs. They lie beside the folder, not in it."""
    return folder.with_name(f"{number}.results")


def write_file(
    folder: Path, number: int, plan: SavePlan, unit: Sequence[LocatedParam], make: Callable[[int], Tensor]
) -> None:
    """Write a file. It gets its name only when it is whole.

    Args:
        plan, unit: the content of the file.
        make: returns the parameter with a number.
    """
    apart = folder / f"{number}.partial"
    shutil.rmtree(apart, ignore_errors=True)
    writer = FileSystemWriter(apart)
    writer.set_up_storage_writer(False, rank=number, use_collectives=False)  # the rank is part of the file's name
    results = writer.write_data(writer.prepare_local_plan(plan), _Maker(unit, make)).wait()
    _results(folder, number).write_bytes(pickle.dumps(results))
    os.replace(apart / file_name(number), folder / file_name(number))
    apart.rmdir()


class _Maker(DefaultSavePlanner):
    """Gives torch one tensor after the other, and makes each tensor when torch requests it."""

    def __init__(self, unit: Sequence[LocatedParam], make: Callable[[int], Tensor]) -> None:
        super().__init__()
        self._chunks = {
            (location.key, location.offset): (param, location) for param in unit for location in param.chunks
        }
        self._make = make
        self._last: tuple[int, Tensor] = (-1, torch.empty(0))

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The data of an item: the chunk of a tensor, or an empty object."""
        if write_item.type == WriteItemType.BYTE_IO:
            empty = io.BytesIO()
            torch.save([None], empty)
            return empty
        assert write_item.index.offset is not None
        param, location = self._chunks[write_item.index.fqn, tuple(write_item.index.offset)]
        if self._last[0] != param.number:
            self._last = param.number, self._make(param.number)
        rows = self._last[1][slice(*location.rows)] if param.shape else self._last[1]
        return rows.reshape(location.sizes(param.shape))


def finish(folder: Path, num_files: int, metadata: Metadata) -> None:
    """Complete a folder of ``num_files`` written files with the metadata that megatron-core needs."""
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

    results = [unpickled(_results(folder, number).read_bytes()) for number in range(num_files)]
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(is_coordinator=True)
    writer.finish(metadata, results)
    torch.save({**VERSION, "content_metadata": CONTENT}, folder / "common.pt")
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))


# reading --------------------------------------------------------------------------------------------------------------


class TorchDistReader:
    """Reads whole parameters of a folder, one at a time."""

    def __init__(self, folder: TorchDistFolder) -> None:
        self._folder = folder
        self._reader = FileSystemReader(folder.path)
        self._reader.set_up_storage_reader(folder.metadata, is_coordinator=False)

    def read(self, param: LocatedParam) -> Tensor:
        """The whole parameter, in the dtype that it has in the folder.

        Raises:
            CheckpointError: it cannot be read.
        """
        first = self._folder.tensors[param.chunks[0].key]
        whole = torch.empty(param.shape, dtype=first.properties.dtype)
        for location in param.chunks:
            rows = whole[slice(*location.rows)] if param.shape else whole
            self._read(location, location.chunk(param.shape), rows.view(location.sizes(param.shape)))
        return whole

    def _read(self, location: ChunkLocation, chunk: ChunkStorageMetadata, box: Tensor) -> None:
        items = create_read_items_for_chunk_list(location.key, self._folder.tensors[location.key], [chunk])
        try:
            self._reader.read_data(LoadPlan(items), _Taker(box)).wait()
        except Exception as error:  # torch.load may raise any error for bytes that are no tensor
            known = isinstance(error, OSError | RuntimeError)
            other = error if known else f"its bytes are no tensor ({type(error).__name__})"
            raise CheckpointError(
                f"cannot read {location.key} in {self._folder.path}: {self._folder.cut_files() or other}; copy the "
                "folder again"
            ) from None


class _Taker(DefaultLoadPlanner):
    """Makes torch read into one tensor."""

    def __init__(self, box: Tensor) -> None:
        super().__init__()
        self._box = box

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of the tensor that an item fills."""
        part = self._box
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Any) -> None:
        """Do nothing: torch has already read into the tensor."""
