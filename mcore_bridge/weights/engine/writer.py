"""The sender's side without a ring: open the memory of an engine's process, and write it by the engine's map."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from mcore_bridge.arguments import COUNT, instance_of, list_of, require
from mcore_bridge.errors import TransferError
from mcore_bridge.weights.engine.group_copies import MapCopies, Pair, take_expected
from mcore_bridge.weights.ipc.shared_memory import Handle, open_shared
from mcore_bridge.weights.plan.engine_map import EngineMap
from mcore_bridge.weights.plan.runs import runs_within
from mcore_bridge.weights.transfer.copier import Buffers

GROUP_BYTES = 1 << 30
"""Bytes of HF tensors that one kernel copies. They are kept in memory until then."""


class EngineWriter:
    """Writes into the memory of one rank of an engine on the same machine. It works for any number of rounds.

    The engine's GPU may differ from the current device, which then writes over the link between the two.

    The engine announces a round with ``MappedEngine.share`` and ends it with ``MappedEngine.complete``. Between these
    calls the engine must not compute. ``export_into`` writes shards of megatron-core, ``write`` HF tensors.

    Args:
        engine_map: the engine's map.
        handles: the result of ``share``. If ``share`` returns new handles later, make another writer from them.
        group_bytes: bytes of HF tensors that are copied at once.

    Raises:
        TransferError: when the handles belong to another map, or this process cannot open their memory.

    Example:
        >>> head = torch.nn.Linear(48, 96, bias=False)                # an engine, and its loader
        >>> head.weight.data = torch.from_file("head", shared=True, size=96 * 48).view(96, 48)  # a GPU needs no file
        >>> load_weights = lambda pairs: head.weight.data.copy_(dict(pairs)["lm_head.weight"])
        >>> engine = mb.map_engine(mb.manifest(models), head, load_weights)
        >>> writer = mb.EngineWriter(engine.map, engine.share())      # in the trainer's process
        >>> writer.write(mb.iter_hf_weights(models))
        >>> engine.complete()                                         # in the engine's process
        >>> torch.equal(head.weight, mb.to_hf_state_dict(models)["lm_head.weight"])
        True
    """

    def __init__(self, engine_map: EngineMap, handles: Sequence[Handle], *, group_bytes: int = GROUP_BYTES) -> None:
        require(
            TransferError,
            engine_map=(engine_map, instance_of("an EngineMap", EngineMap)),
            handles=(handles, list_of("what MappedEngine.share returned", Handle)),
            group_bytes=(group_bytes, COUNT),
        )
        if len(handles) != 1 + len(engine_map.tensors):
            raise TransferError(
                f"expected a handle for a mark and for each of the map's {len(engine_map.tensors)} tensors, found "
                f"{len(handles)}; pass the map and the handles of one engine"
            )
        self.map, self._group_bytes = engine_map, group_bytes
        if {*(handle.digest for handle in handles)} != {engine_map.digest}:
            raise TransferError(
                "expected handles of an engine with this map, found handles of another map: pass the "
                "handles of this engine"
            )
        self._mark, *tensors = map(open_shared, handles)
        self.memory = Buffers(tensors)
        """The engine's tensors in the order of its map, uint8 [bytes] each."""
        self.program: object = None
        """What ``export_into`` keeps between rounds."""
        self._copies = MapCopies(engine_map)

    def write(self, pairs: Iterable[Pair]) -> None:
        """Write all HF tensors, as ``iter_hf_weights`` yields them. When this returns, the GPU has written them.

        Raises:
            TransferError: when a tensor of the map has not come, or came with another shape or dtype. The engine's
                weights are then half old and half new.
        """
        expected = {spec.name: spec for spec in self.map.sources}
        contiguous = ((name, tensor.contiguous()) for name, tensor in pairs)
        for group in runs_within(contiguous, lambda pair: pair[1].nbytes, self._group_bytes):
            take_expected(group, expected)
            self._copies.run(group, self.memory)
        if expected:
            raise TransferError(f"{len(expected)} tensors never came, such as {next(iter(expected))}")
        self.complete()

    def complete(self) -> None:
        """Wait until everything is written, then set the mark, by which the engine detects writes to old addresses."""
        self._mark.view(torch.int64).add_(1)
        if self._mark.is_cuda:
            torch.cuda.current_stream(self._mark.device).synchronize()

    def close(self) -> None:
        """Close the engine's memory."""
        self.memory, self._mark, self.program = Buffers([]), torch.zeros(8, dtype=torch.uint8), None
        self._copies = MapCopies(self.map)
