"""The sender's side of a pull: the engine's process opens this rank's tensors, and runs the composed copies itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mcore_bridge.errors import TransferError
from mcore_bridge.rules.spec import Pair, TensorSpec
from mcore_bridge.weights.engine.composed import MapWriter
from mcore_bridge.weights.ipc.shared_memory import Handle, allocate, share_part
from mcore_bridge.weights.plan.boxes import Table
from mcore_bridge.weights.plan.engine_map import EngineMap
from mcore_bridge.weights.transfer.copier import MOST_ALLOCATIONS, Buffers, CopyTable, whole_of

MOST_CAST_BYTES = 64 << 20
"""Bytes of HF tensors which the map casts. They travel as bytes of a message."""


class Dialogue(Protocol):
    """Questions to the worker of an engine, which answers them in their order."""

    def send(self, method: str, arguments: Sequence[Any] = ()) -> None:
        """Ask for a method of the worker."""

    def answer(self) -> Any:
        """The next answer; raises ``TransferError`` if the worker failed, at once if it was silent or has ended."""


class PullWriter(MapWriter):
    """Writes into one rank of an engine on the same machine, whose memory this process cannot open.

    While the engine copies, this rank checks the tensors of the next messages. It waits for answers where windows are
    used again, and at the end. An error of the engine does not stop an export, since other ranks take part:
    ``complete`` raises it.

    Args:
        engine_map: the engine's map.
        line: reaches a ``Puller`` of the engine.
    """

    def __init__(self, engine_map: EngineMap, line: Dialogue) -> None:
        super().__init__(engine_map)
        self._line = line
        self._num_due = 0
        """The number of answers that the engine has not given yet."""
        self._allocations = Buffers([]).allocations
        self._numbers: dict[CopyTable, int] = {}
        """The number by which the engine has each table."""
        self._windows: dict[int, tuple[int, Tensor]] = {}
        """By its address, each allocation of windows that the engine has opened in this round, with its number."""
        self._problem: TransferError | None = None

    def announce(self) -> None:
        """Begin a round: the engine looks up its memory while the ranks of the trainer agree on a plan."""
        self._problem = None
        self._ask("pull_announce")

    def open(self, tensors: Iterable[Tensor]) -> list[Handle]:
        """Handles of the memory of this rank's tensors, for a trial.

        Raises:
            TransferError: when the engine should not pull: the tensors lie in too many allocations, another process
                cannot open them, or the map casts many values.
        """
        sources = {spec.name: spec for spec in self.map.sources}
        cast_bytes = sum(sources[name].num_bytes for name in {copy.hf for copy in self.map.copies if copy.casts})
        if cast_bytes > MOST_CAST_BYTES:
            raise TransferError(f"the engine's map casts HF tensors of {cast_bytes} bytes to another dtype")
        allocations = Buffers([tensor.detach() for tensor in tensors]).allocations
        if len(allocations.wholes) > MOST_ALLOCATIONS:
            raise TransferError(
                f"expected weights in at most {MOST_ALLOCATIONS} allocations, as megatron-core's DDP makes them for "
                "its distributed optimizer, found more"
            )
        return [share_part(whole, self.map.digest) for whole in allocations.wholes]

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        """Memory for windows that the engine's process can open."""
        return allocate(num_bytes, device)

    def _hold(self, held: Buffers) -> None:
        allocations = held.allocations
        if not allocations.is_like(self._allocations):
            self._numbers = {}
        self._allocations, self._windows = allocations, {}
        _synchronize(held)
        self._ask("pull_begin", [share_part(whole, self.map.digest) for whole in allocations.wholes])

    def _run(self, table: CopyTable, windows: Tensor) -> None:
        number, rows, place, handle = self._numbers.get(table), None, -1, None
        if number is None:
            number = self._numbers[table] = len(self._numbers)
            rows = self._rows(table)
        if windows.numel():
            place, whole = self._windows.setdefault(windows.data_ptr(), (len(self._windows), windows))
            if whole is windows:
                handle = share_part(whole_of(windows), self.map.digest)
            _synchronize(Buffers([windows]))
        self._ask("pull_copy", number, rows, place, handle)
        if windows.numel():
            self._take_answers()

    def _rows(self, table: CopyTable) -> Table:
        """The rows of a table with allocations in the place of this rank's tensors."""
        rows, allocations = table.table.copy(), self._allocations
        num_held = len(allocations.numbers)
        is_held = rows[:, 0] < num_held
        held = rows[is_held, 0]
        rows[is_held, 1] += allocations.offsets[held]
        rows[is_held, 0] = allocations.numbers[held]
        shift = len(allocations.wholes) - num_held
        rows[~is_held, 0] += shift
        rows[:, 2] += shift
        return rows

    def write_group(self, group: Sequence[Pair]) -> None:
        """See ``MapWriter``."""
        self._ask("pull_write", [(TensorSpec.of(name, t), _bytes_of(t)) for name, t in group])

    def _ask(self, method: str, *arguments: Any) -> None:
        if self._problem is None:
            try:
                self._line.send(method, arguments)
                self._num_due += 1
            except TransferError as error:
                self._problem = error

    def _take_answers(self) -> None:
        while self._num_due:
            self._num_due -= 1
            try:
                self._line.answer()
            except TransferError as error:
                self._problem = self._problem or error

    def complete(self) -> None:
        """Raise what the engine has reported in this round."""
        self._take_answers()
        self._windows.clear()
        if self._problem is not None:
            raise self._problem

    def let_go(self) -> None:
        """See ``MapWriter``."""
        super().let_go()
        self._allocations.wholes = []


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()


def _synchronize(buffers: Buffers) -> None:
    """Wait for all that this process has queued on GPUs with buffers: another process reads them now."""
    for index in buffers.gpus:
        torch.cuda.current_stream(index).synchronize()
