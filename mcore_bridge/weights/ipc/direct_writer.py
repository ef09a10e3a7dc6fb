"""The sender's side without a ring: the memory of an engine's process, opened here, and written by the engine's map."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mcore_bridge.errors import TransferError
from mcore_bridge.weights.ipc.engine_copies import EngineCopies, require_expected
from mcore_bridge.weights.ipc.shared_memory import Handle, open_shared
from mcore_bridge.weights.plan.engine_map import EngineMap
from mcore_bridge.weights.plan.runs import runs_within
from mcore_bridge.weights.transfer.copier import Buffers

Pair = tuple[str, Tensor]
GROUP_BYTES = 1 << 30
"""HF tensors that one kernel copies, and that are in memory until then."""


class DirectWriter:
    """Writes into the memory of one rank of an engine on the same machine. May be used for any number of rounds.

    The engine's GPU may be another one than the current device, which writes over the link between the two.

    The engine announces a round with ``MappedEngine.share`` and ends it with ``MappedEngine.complete``. In between it
    must compute nothing. ``export_into`` of ``mcore_bridge.weights.direct_export`` writes shards of megatron-core,
    ``write`` HF tensors.

    Args:
        engine_map: the engine's map.
        handles: what ``share`` returned. If it returns others later, make another writer of them.
        group_bytes: bytes of HF tensors that are copied at once.

    Raises:
        TransferError: when this process cannot open the engine's memory, or the engine has another map.
    """

    def __init__(self, engine_map: EngineMap, handles: Sequence[Handle], *, group_bytes: int = GROUP_BYTES) -> None:
        self.map, self._group_bytes = engine_map, group_bytes
        if {*(handle.digest for handle in handles)} != {engine_map.digest}:
            raise TransferError("expected handles of an engine with this map, found others: take them of that engine")
        self._mark, *tensors = map(open_shared, handles)
        self.memory = Buffers(tensors)
        """The engine's tensors in the order of its map, uint8 [bytes] each."""
        self.program: object = None
        """What ``export_into`` keeps between rounds."""
        self._groups: dict[int, tuple[tuple[str, ...], EngineCopies]] = {}

    def write(self, pairs: Iterable[Pair]) -> None:
        """Write all HF tensors, as ``iter_hf_weights`` yields them; when this returns, the GPU has done so.

        Raises:
            TransferError: when tensors of the map have not come, or come otherwise. The engine's weights are then half
                old and half new.
        """
        expected = {spec.name: spec for spec in self.map.sources}
        contiguous = ((name, tensor.contiguous()) for name, tensor in pairs)
        for number, group in enumerate(runs_within(contiguous, lambda pair: pair[1].nbytes, self._group_bytes)):
            for name, tensor in group:
                require_expected([(name, tensor)], expected)
                del expected[name]
            self._copy(number, group)
        if expected:
            raise TransferError(f"{len(expected)} tensors never came, such as {next(iter(expected))}")
        self.finish()

    def finish(self) -> None:
        """Wait until everything is written, and leave a mark, by which the engine knows where this was."""
        self._mark.view(torch.int64).add_(1)
        if self._mark.is_cuda:
            torch.cuda.current_stream(self._mark.device).synchronize()

    def close(self) -> None:
        """Let go of the engine's memory."""
        self.memory, self._mark, self.program = Buffers([]), torch.zeros(8, dtype=torch.uint8), None
        self._groups.clear()

    def _copy(self, number: int, group: Sequence[Pair]) -> None:
        names = tuple(name for name, _ in group)
        known = self._groups.get(number)
        if known is None or known[0] != names:
            entries = [
                (copy, place, tensor.dtype)
                for place, (name, tensor) in enumerate(group)
                for copy in self.map.by_hf.get(name, ())
            ]
            known = self._groups[number] = (
                names,
                EngineCopies(entries, self.map.dtypes, self.map.places, apart=True),
            )
        known[1].run_apart([tensor for _, tensor in group], self.memory)
