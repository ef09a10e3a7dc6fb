"""The collectives of exports, loads and saves: agree on a flag, exchange descriptions, gather windows of bytes.

If all windows of a message have one width, one collective among all ranks carries them. Widths differ if stages send
one after the other. NCCL then makes a broadcast for each rank, and each broadcast takes time on every rank. So among
many ranks such windows travel in two steps. First they go within columns: a column has one rank of each stage, at equal
places. Then whole columns go within stages.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_bridge.config.mesh.lost_ranks import naming_lost_ranks, note_process

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection


_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""torch 2.13 has a new name, and warns about the old one, also where megatron-core calls it."""
_SIZE, _SMALL = 8, 4096
"""Bytes of the size of a pickle, and of a pickle that travels with its size."""
FLAT = 16
"""With this many ranks or fewer, all windows travel in one step."""


class Row(NamedTuple):
    """Consecutive ranks whose windows begin at equal distances."""

    first: int
    length: int
    distance: int


class Lineup(NamedTuple):
    """The windows of a message."""

    starts: tuple[int, ...]
    """The byte at which the window of each rank begins."""
    columns: tuple[int, ...]
    """Bytes of each column, the windows of one rank of each stage; empty if windows lie in the order of ranks."""
    rows: tuple[Row, ...]
    """All ranks, in order."""


@lru_cache(maxsize=256)
def lineup(widths: tuple[int, ...], num_stages: int) -> Lineup:
    """Line up the windows of a message.

    Args:
        widths: bytes of the window of each rank. All stages have equally many ranks, and these are consecutive.
        num_stages: 1 if windows must lie one behind the other, for any widths.
    """
    columns: tuple[int, ...] = ()
    if num_stages == 1 or len({*widths}) == 1:
        starts = tuple(accumulate(widths[:-1], initial=0))
    else:
        stage_size = len(widths) // num_stages
        by_column = [widths[place::stage_size] for place in range(stage_size)]
        columns = tuple(map(sum, by_column))
        begins = [
            accumulate(column[:-1], initial=start)
            for column, start in zip(by_column, accumulate(columns[:-1], initial=0), strict=True)
        ]
        starts = tuple(start for stage in zip(*begins, strict=True) for start in stage)
    return Lineup(starts, columns, tuple(_rows(starts)))


def _rows(starts: tuple[int, ...]) -> list[Row]:
    rows = [Row(0, 1, 0)]
    for rank in range(1, len(starts)):
        distance, last = starts[rank] - starts[rank - 1], rows[-1]
        if distance > 0 and (last.length == 1 or last.distance == distance):
            rows[-1] = Row(last.first, last.length + 1, distance)
        else:
            rows.append(Row(rank, 1, 0))
    return rows


T = TypeVar("T")
MODULUS = 1 << 40
"""Modulus of numbers that are added up, so that the sum over millions of ranks fits an int64."""


def _gather(group: dist.ProcessGroup | None, whole: Tensor, own: Tensor, widths: Sequence[int]) -> list[Any]:
    """Begin to gather windows, one behind the other in ``whole``. This rank's ``own`` is a part of ``whole``."""
    if len({*widths}) == 1:
        return [_all_gather(whole, own, group=group, async_op=True)]
    windows = whole.split([*widths])
    if whole.is_cuda:
        return [dist.all_gather([*windows], own, group=group, async_op=True)]
    pairs = zip(dist.get_process_group_ranks(group), windows, strict=True)  # gloo gathers only equal sizes
    return [dist.broadcast(window, rank, group=group, async_op=True) for rank, window in pairs]


def _wait(works: Iterable[Any]) -> None:
    for work in works:
        work.wait()


class Group:
    """A process group, with the collectives of an export. Ranks are ranks of the group."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        column: dist.ProcessGroup | None = None,
        stage: dist.ProcessGroup | None = None,
    ) -> None:
        """Wrap a group.

        Args:
            group: None is the world.
            column: if the group has many pipeline stages, the ranks at this rank's position in each stage.
            stage: the ranks of this rank's stage.
        """
        note_process()
        self.group = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        self.members = dist.get_process_group_ranks(self.group)
        """The ranks of the members in the world."""
        self.device = self._device()
        self._grid = (column, stage) if column and stage and self._are_grid(column, stage) else None
        self._stream = torch.cuda.Stream(self.device) if self._grid and self.device.type == "cuda" else None

    def _device(self) -> torch.device:
        if "nccl" in str(dist.get_backend(self.group)):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @property
    def is_fake(self) -> bool:
        """Whether the group has torch's ``fake`` backend, so that no data comes from other ranks."""
        return dist.get_backend(self.group) == "fake"

    @classmethod
    def of_trainer(cls) -> Group:
        """All ranks of the job, by gloo: a separate group, which carries no weights. ``close`` ends it."""
        return cls(dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None)

    def close(self) -> None:
        """End a group that ``of_trainer`` has made."""
        if self.group is not dist.group.WORLD:
            dist.destroy_process_group(self.group)

    @classmethod
    def of_replica(cls, groups: ProcessGroupCollection) -> Group:
        """The smallest group with a whole model: dense parameters lie within ``mp``, experts within ``tp_ep_pp``.

        The group is chosen by sizes, because these are equal on all ranks. If neither size divides the other, no group
        contains the other on all ranks. Then only the world will do.
        """
        dense, experts = groups.mp.size(), groups.tp_ep_pp.size()
        if dense % experts == 0:
            return cls(groups.mp, column=groups.pp, stage=groups.tp)
        if experts % dense == 0:
            return cls(groups.tp_ep_pp, column=groups.pp, stage=getattr(groups, "tp_ep", None))
        return cls(None)

    @classmethod
    def across_replicas(cls, groups: ProcessGroupCollection) -> Group:
        """The ranks at this rank's position in each replica, with the replicas of ``of_replica``."""
        dense, experts = groups.mp.size(), groups.tp_ep_pp.size()
        if dense % experts == 0:
            return cls(groups.dp_cp)
        return cls(groups.expt_dp if experts % dense == 0 else None)

    def _are_grid(self, column: dist.ProcessGroup, stage: dist.ProcessGroup) -> bool:
        """Whether the group has more than ``FLAT`` ranks and forms a grid, stage after stage.

        Then ``stage`` is this rank's row, and ``column`` is its column, with one rank of every stage.
        """
        if min(column.size(), stage.size()) == 1 or not self.size == column.size() * stage.size() > FLAT:
            return False
        row, place = divmod(self.rank, stage.size())
        in_column, in_stage = map(dist.get_process_group_ranks, (column, stage))
        return (
            self.members[place :: stage.size()] == in_column
            and self.members[row * stage.size() :][: stage.size()] == in_stage
        )

    @property
    def num_stages(self) -> int:
        """Pipeline stages by which windows of different widths travel in two steps; 1 means one step."""
        return self._grid[0].size() if self._grid else 1

    @naming_lost_ranks("sending windows of weights")
    def gather_windows(self, whole: Tensor, own: Tensor, widths: Sequence[int], columns: Sequence[int]) -> list[Any]:
        """Begin to gather windows, which lie in ``whole`` one behind the other, or column by column.

        Windows in columns first go to this rank's column. Then the whole column goes to this rank's stage. On a GPU,
        the collectives of several groups are enqueued on a separate stream, one after the other.
        """
        if self._grid is None:
            return _gather(self.group, whole, own, widths)
        column, stage = self._grid
        with self._beside_current():
            if columns:
                place = dist.get_rank(stage)
                mine = whole.split([*columns])[place]
                _wait(_gather(column, mine, own, widths[place :: stage.size()]))
                works = _gather(stage, whole, mine, columns)
            else:
                works = _gather(self.group, whole, own, widths)
            if self._stream is not None:
                _wait(works)
        return works

    @naming_lost_ranks("sending windows of weights")
    def exchange_windows(self, received: Tensor, sent: Tensor, widths: Sequence[int], own: Sequence[int]) -> list[Any]:
        """Begin to exchange windows: ``sent`` has this rank's window for each rank, one behind the other.

        Args:
            received: memory for the windows of all ranks, one behind the other.
            widths, own: bytes of each window that is received, and of each window that is sent.
        """
        return [dist.all_to_all_single(received, sent, [*widths], [*own], group=self.group, async_op=True)]

    @contextmanager
    def _beside_current(self) -> Iterator[None]:
        """Run the block on a separate stream, after all work that is already enqueued on the current stream."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield

    def all_true(self, is_well: bool) -> bool:
        """Whether a flag is set on every rank. An export begins and ends with this small collective."""
        return not self.most([not is_well])[0]

    def first_in_common(self, fits: Sequence[bool], count: int, version: int) -> int | None:
        """The first of ``count`` indices that fits on every rank; None if no index fits, or if versions differ."""
        misfits = [*(int(not fit) for fit in fits), *[1] * (count - len(fits))]
        *misfits, largest, negated = self.most([*misfits, version, -version])
        return misfits.index(0) if 0 in misfits and largest == -negated else None

    def most(self, numbers: Sequence[int]) -> list[int]:
        """The maximum over all ranks of each number."""
        return self._reduced(numbers, dist.ReduceOp.MAX)

    @naming_lost_ranks("agreeing with other ranks")
    def _reduced(self, numbers: Sequence[int], operation: dist.ReduceOp.RedOpType) -> list[int]:
        """Each number, reduced over all ranks."""
        if self.size == 1:
            return list(map(int, numbers))
        with self._beside_current():
            reduced = torch.tensor(numbers, dtype=torch.int64, device=self.device)
            dist.all_reduce(reduced, operation, group=self.group)
            return [int(number) for number in reduced.tolist()]

    @naming_lost_ranks("comparing tensors with other ranks")
    def maximum(self, tensor: Tensor) -> Tensor:
        """The elementwise maximum of the tensors of all ranks, as a new tensor where the group communicates."""
        largest = tensor.to(self.device, copy=True)
        if self.size > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return largest

    def max(self, number: int) -> int:
        """The maximum of the numbers of all ranks."""
        return self.most([number])[0]

    def sums_to_zero(self, number: int) -> bool:
        """Whether the numbers of all ranks add up to a multiple of ``MODULUS``."""
        return self._reduced([number % MODULUS], dist.ReduceOp.SUM)[0] % MODULUS == 0

    @naming_lost_ranks("gathering a tensor")
    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, as new tensors. All ranks pass one shape and dtype."""
        gathered = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in self.members]
        dist.all_gather(gathered, tensor.contiguous(), group=self.group)
        return gathered

    @naming_lost_ranks("broadcasting a tensor")
    def broadcast(self, tensor: Tensor, rank: int) -> None:
        """Overwrite the tensor of every rank with the tensor of ``rank``."""
        dist.broadcast(tensor, self.members[rank], group=self.group)

    def all_gather_object(self, value: T) -> list[T]:
        """The ``value`` of every rank, sent as a pickle. Pickles that are all small take one collective.

        torch's function takes two, since it gathers their sizes first.
        """
        if self.size == 1:
            return [value]
        own = pickle.dumps(value)
        pickles, most = self._gathered(own, _SMALL)
        if most > _SMALL:
            pickles, _ = self._gathered(own, most)
        return [*map(pickle.loads, pickles)]

    @naming_lost_ranks("exchanging descriptions with other ranks")
    def _gathered(self, own: bytes, room: int) -> tuple[list[bytes], int]:
        """The first ``room`` bytes of the bytes of every rank, and the largest number of bytes of a rank."""
        sent = torch.zeros(_SIZE + room, dtype=torch.uint8)
        sent[:_SIZE].view(torch.int64)[0] = len(own)
        sent[_SIZE : _SIZE + len(own)] = torch.frombuffer(bytearray(own[:room]), dtype=torch.uint8)
        gathered = torch.empty(self.size * len(sent), dtype=torch.uint8, device=self.device)
        _all_gather(gathered, sent.to(self.device), group=self.group)
        rows = gathered.cpu().view(self.size, len(sent))
        sizes = rows[:, :_SIZE].contiguous().view(torch.int64).flatten().tolist()
        return [row[_SIZE:][:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)], max(sizes)
