"""An engine's worker elsewhere is one more rank of a trainer's export: it holds nothing, and gets what it needs."""

from __future__ import annotations

from contextlib import closing

from mcore_bridge.engines.joint_group import JointGroup
from mcore_bridge.errors import TransferError
from mcore_bridge.weights.engine.comparison import MapComparison
from mcore_bridge.weights.engine.composed import MemoryWriter
from mcore_bridge.weights.engine.mapped_engine import MappedEngine
from mcore_bridge.weights.transfer.endpoints import Held
from mcore_bridge.weights.transfer.executor import new_tensors, run_messages
from mcore_bridge.weights.transfer.program import Program


class Guest:
    """Takes rounds for a mapped engine.

    Args:
        engine: the engine. If its map covers all, shards become its tensors, else its loader takes HF tensors.
        group: the ranks of the trainer, and all workers that they serve elsewhere.
    """

    def __init__(self, engine: MappedEngine, group: JointGroup) -> None:
        self._engine, self._group = engine, group
        self._program: Program | None = None
        self._writer: MemoryWriter | None = None

    def follow(self, program: Program) -> None:
        """Run these steps from now on."""
        self._program, self._specs = program, tuple(program.plan.tensors())
        self._writer = None if self._engine.map.uncovered else MemoryWriter(self._engine.map)

    def exchange(self, version: int, taker: MappedEngine | MapComparison | None) -> None:
        """Take one round, together with all members of the group.

        Args:
            version: the version of the weights.
            taker: what takes the HF tensors of the round: the engine, or a comparison with it. None takes nothing.

        Raises:
            TransferError: when the engine cannot take it. The round of other members goes on.
        """
        assert self._program is not None
        writer = self._writer if taker is self._engine else None
        problem = None
        try:
            if isinstance(taker, MapComparison):
                self._engine.require_whole()
            if writer is not None:
                writer.memory = self._engine.announce(self._specs)
            elif taker is not None:
                taker.begin(self._specs)
        except TransferError as error:  # other members wait for this one
            problem, taker = error, None
        into = writer.begin if writer is not None and problem is None else new_tensors
        with self._group.watched(), closing(run_messages(self._program, self._group, Held({}), into=into)) as messages:
            for pairs in messages:
                if taker is None:
                    break
                if group := [*pairs]:
                    taker.write(group)
        if problem is not None:
            raise problem
        if writer is not None:
            writer.end(self._group.device)
        if taker is not None:
            taker.complete(version)

    def close(self) -> None:
        """Leave the group, which breaks it."""
        self._group.close()
