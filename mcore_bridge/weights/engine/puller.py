"""The engine's side of a pull: its own process runs a sender's composed copies, out of the sender's memory.

So the engine's memory need not be one that another process can open, such as the memory of vLLM's sleep mode. The
sender's memory is opened for a round, and let go at its end: a trainer may free it or move it then.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mcore_bridge.errors import TransferError
from mcore_bridge.rules.spec import Pair, TensorSpec
from mcore_bridge.weights.engine.mapped_engine import MappedEngine
from mcore_bridge.weights.ipc.shared_memory import Handle, open_all
from mcore_bridge.weights.plan.boxes import Table
from mcore_bridge.weights.transfer.copier import AllocationLayout, Buffers, CopyTable, PlacedMaker, runs_kernel

_NOT_BEGUN = "expected a round that has begun, found none: its begin has failed"
_OTHER = (
    "expected memory for this engine's map, found memory for another map: the sender must take the map of this engine"
)


@dataclass(slots=True)
class _Sender:
    """What a sender has said, and its memory."""

    layout: AllocationLayout | None = None
    tables: dict[int, CopyTable] = field(default_factory=dict)
    maker: PlacedMaker | None = None
    """Makes codes and scales, if the sender leaves this to the engine."""
    buffers: Buffers | None = None
    """The tensors of the export and of the engine; None until a round has begun."""
    has_made: bool = False
    """Whether ``maker`` has run in this round."""


class Puller:
    """Takes rounds for a mapped engine. Senders have numbers; all of them send the tensors of one export.

    Args:
        engine: the engine.
        tensors: the HF tensors, or their slices, for which the sender composes copies.
        device: where the engine's tensors are.
    """

    def __init__(self, engine: MappedEngine, tensors: Sequence[TensorSpec], device: torch.device) -> None:
        self._engine, self._tensors, self._device = engine, tuple(tensors), device
        self._senders = defaultdict[int, _Sender](_Sender)
        self._memory: Buffers | None = None
        """The engine's memory; None until a round is announced."""
        self._windows: dict[int, Tensor] = {}

    def open(self, handles: Sequence[Handle]) -> list[Tensor]:
        """The sender's memory. There is none if the sender holds nothing that this engine needs.

        Raises:
            TransferError: when the handles belong to another map, or this process cannot open the memory.
        """
        return open_all(handles, self._engine.map.digest, _OTHER) if handles else []

    @property
    def can_encode(self) -> bool:
        """Whether this process can encode weights into the engine's memory, in a round that was announced."""
        return runs_kernel(self._device) and self._memory is not None and self._memory.takes_rows(self._device)

    def announce(self) -> None:
        """Announce a round.

        Raises:
            TransferError: as ``MappedEngine.announce``.
        """
        self._let_go()
        self._memory = self._engine.announce(self._tensors)

    def _let_go(self) -> None:
        self._memory = None
        for known in self._senders.values():
            known.buffers, known.has_made = None, False

    def make_by(self, sender: int, maker: PlacedMaker) -> None:
        """Make codes and scales of a sender by ``maker`` in the rounds for which it says so."""
        self._senders[sender].maker = maker

    def learn(self, sender: int, handle: Handle) -> None:
        """Learn what a sender has written into memory of the host: its only table of copies, and its maker."""
        (memory,) = self.open([handle])
        table, maker = pickle.loads(memory.numpy())  # type: ignore[arg-type]  # any bytes
        self._senders[sender] = _Sender(tables={0: CopyTable(table)}, maker=maker)

    def begin(self, sender: int, handles: Sequence[Handle], layout: AllocationLayout | None) -> None:
        """Open the memory of a sender for the round that was announced.

        Args:
            sender: its number.
            handles: of the allocations of the sender.
            layout: how the tensors of the export lie in them; None if this has not changed.

        Raises:
            TransferError: as ``open``, or when no round was announced.
        """
        if self._memory is None:
            raise TransferError("expected a round that was announced, found none: its announcement has failed")
        known = self._senders[sender]
        known.layout, known.buffers = layout or known.layout, None
        assert known.layout is not None
        known.buffers = Buffers.laid(known.layout, self.open(handles)).beside(self._memory)

    def make(self, sender: int) -> None:
        """Begin to encode the weights of a sender whose memory is open.

        Raises:
            TransferError: when the engine's tensors have moved to addresses where no codes can be written.
        """
        known = self._senders[sender]
        if known.maker is None or known.buffers is None or self._memory is None:
            raise TransferError(_NOT_BEGUN)
        if not self.can_encode:
            raise TransferError(
                "expected tensors of the engine at multiples of 16 bytes, as when the sync began, found others: "
                "sync once more"
            )
        known.buffers = known.buffers.with_others(known.maker.make(known.buffers, self._memory, self._device))
        known.has_made = True

    def done(self) -> dict[int, tuple[int, int]]:
        """Wait until everything is copied; what could not be made of each sender, as ``PlacedMaker.wrong`` says."""
        self._synchronize()
        makers = {sender: known.maker for sender, known in self._senders.items() if known.has_made and known.maker}
        every = ((sender, maker.wrong()) for sender, maker in makers.items())
        return {sender: wrong for sender, wrong in every if wrong is not None}

    def copy(self, sender: int, number: int, table: Table | None, windows: int, handle: Handle | None) -> None:
        """Run copies. Copies from windows are done when this returns, and all other copies when the round completes.

        Args:
            sender: the sender from whose memory they read.
            number: the number of the table of copies among those of the sender.
            table: its rows (fields of ``ByteCopy``); None if they have come before. Buffers are the tensors of the
                export, then the engine's tensors, and then windows.
            windows: the number of the windows from which they read.
            handle: these windows, if this round has not opened them yet.
        """
        known = self._senders[sender]
        if table is not None:
            if number == 0:  # the sender has begun to number anew
                known.tables = {}
            known.tables[number] = CopyTable(table)
        if handle is not None:
            (self._windows[windows],) = self.open([handle])
        if known.buffers is None:
            raise TransferError(_NOT_BEGUN)
        passing = [self._windows[windows]] if windows in self._windows else []
        known.tables[number].run(known.buffers, Buffers(passing), self._device)
        if passing:
            self._synchronize()

    def write(self, group: Sequence[tuple[TensorSpec, bytes]]) -> None:
        """Take HF tensors which the map casts, or whose copies could not be composed."""
        self._engine.write([self._pair(spec, values) for spec, values in group])

    def _pair(self, spec: TensorSpec, values: bytes) -> Pair:
        tensor = torch.frombuffer(bytearray(values), dtype=spec.dtype).view(spec.shape)
        return spec.name, tensor.to(self._device)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Let go of the sender's memory, once all copies are done."""
        self._synchronize()
        self._let_go()
        self._windows.clear()
