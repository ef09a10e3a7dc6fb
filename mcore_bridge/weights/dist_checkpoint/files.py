"""The files of a ``torch_dist`` folder, written and read by torch's own code, one file or parameter at a time.

A parameter is one or more *places* in the tensors of such a folder: a box of a tensor has some rows of the parameter.
"""

from __future__ import annotations

import io
import math
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
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from mcore_bridge.errors import CheckpointError
from mcore_bridge.weights.dist_checkpoint.folder import CONTENT, VERSION, TorchDistFolder


@dataclass(frozen=True, slots=True)
class ChunkLocation:
    """``rows`` (start, stop) of a parameter are a box of the tensor ``key``, whose leading dims are of size 1 there."""

    key: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    """Where the box begins."""
    rows: tuple[int, int]
    padded: bool = False
    """Whether the tensor may have more rows than the model needs: a vocabulary."""

    def sizes(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Of the box, for a parameter of ``shape``."""
        leading = len(self.shape) - len(shape)
        return (*(1,) * leading, self.rows[1] - self.rows[0], *shape[1:])

    def chunk(self, shape: Sequence[int]) -> ChunkStorageMetadata:
        """The box as torch describes it."""
        return ChunkStorageMetadata(torch.Size(self.offset), torch.Size(self.sizes(shape)))


@dataclass(frozen=True, slots=True)
class LocatedParam:
    """A parameter and its places."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    places: tuple[ChunkLocation, ...]


# writing --------------------------------------------------------------------------------------------------------------


def plan_files(units: Iterable[Sequence[LocatedParam]], objects: Sequence[str]) -> tuple[list[SavePlan], Metadata]:
    """What goes to each file, and what the folder says of all of them; ``objects``, which are empty, go to the last."""
    plans = [SavePlan([_item(each, place) for each in unit for place in each.places]) for unit in units]
    plans.append(SavePlan([WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in objects]))
    return create_default_global_save_plan(plans)


def _item(placed: LocatedParam, place: ChunkLocation) -> WriteItem:
    properties = TensorProperties(dtype=placed.dtype)
    data = TensorWriteData(place.chunk(placed.shape), properties, torch.Size(place.shape))
    return WriteItem(MetadataIndex(place.key, data.chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def file_name(number: int) -> str:
    """Of the file with this number."""
    return f"__{number}_0.distcp"


def _results(folder: Path, number: int) -> Path:
    """What torch must know of a file to finish the folder. It is kept beside the folder, as it is not part of it."""
    return folder.with_name(f"{number}.results")


def write_file(
    folder: Path, number: int, plan: SavePlan, unit: Sequence[LocatedParam], make: Callable[[int], Tensor]
) -> None:
    """Write a file that is there under its name only when it is whole.

    Args:
        make: the parameter with a number.
    """
    apart = folder / f"{number}.partial"
    shutil.rmtree(apart, ignore_errors=True)
    writer = FileSystemWriter(apart)
    writer.set_up_storage_writer(False, rank=number, use_collectives=False)  # by which it names the file
    results = writer.write_data(writer.prepare_local_plan(plan), _Maker(unit, make)).wait()
    _results(folder, number).write_bytes(pickle.dumps(results))
    os.replace(apart / file_name(number), folder / file_name(number))
    apart.rmdir()


class _Maker(DefaultSavePlanner):
    """Gives torch one tensor after the other, each made when it is asked for."""

    def __init__(self, unit: Sequence[LocatedParam], make: Callable[[int], Tensor]) -> None:
        super().__init__()
        self._places = {(place.key, place.offset): (each, place) for each in unit for place in each.places}
        self._make = make
        self._last: tuple[int, Tensor] = (-1, torch.empty(0))

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The data of an item: of a tensor its box, of an object none."""
        if write_item.type == WriteItemType.BYTE_IO:
            empty = io.BytesIO()
            torch.save([None], empty)
            return empty
        assert write_item.index.offset is not None
        placed, place = self._places[write_item.index.fqn, tuple(write_item.index.offset)]
        if self._last[0] != placed.number:
            self._last = placed.number, self._make(placed.number)
        rows = self._last[1][slice(*place.rows)] if placed.shape else self._last[1]
        return rows.reshape(place.sizes(placed.shape))


def finish(folder: Path, num_files: int, metadata: Metadata) -> None:
    """Make a folder of ``num_files`` written files one that megatron-core reads."""
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

    results = [pickle.loads(_results(folder, number).read_bytes()) for number in range(num_files)]
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

    def read(self, placed: LocatedParam) -> Tensor:
        """The parameter, in the dtype that the folder has it in.

        Raises:
            CheckpointError: the folder has not all of it, or cannot be read.
        """
        first = self._folder.tensors[placed.places[0].key]
        whole = torch.empty(placed.shape, dtype=first.properties.dtype)
        for place in placed.places:
            rows = whole[slice(*place.rows)] if placed.shape else whole
            self._read(place, place.chunk(placed.shape), rows.view(place.sizes(placed.shape)))
        return whole

    def _read(self, place: ChunkLocation, chunk: ChunkStorageMetadata, box: Tensor) -> None:
        items = create_read_items_for_chunk_list(place.key, self._folder.tensors[place.key], [chunk])
        found = sum(math.prod(item.lengths) for item in items)
        if found != box.numel():
            raise CheckpointError(
                f"{self._folder.path} has {found} of the {box.numel()} elements of {place.key} at {place.offset}: its "
                "save did not come to an end; use an earlier iteration"
            )
        try:
            self._reader.read_data(LoadPlan(items), _Taker(box)).wait()
        except Exception as error:  # of bytes that are no tensor, torch.load runs into anything
            known = isinstance(error, OSError | RuntimeError)
            problem = error if known else f"what is there is no tensor ({type(error).__name__})"
            raise CheckpointError(
                f"cannot read {place.key} in {self._folder.path}: {problem}; copy the folder again"
            ) from None


class _Taker(DefaultLoadPlanner):
    """Has torch read into one box."""

    def __init__(self, box: Tensor) -> None:
        super().__init__()
        self._box = box

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where a piece of the box goes."""
        found = self._box
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            found = found.narrow(dim, start, length)
        return found

    def commit_tensor(self, read_item: ReadItem, tensor: Any) -> None:
        """It is in place."""
