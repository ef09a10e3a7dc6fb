"""An engine's worker elsewhere is one more rank of a trainer's export: it holds nothing, and gets what it needs."""

from __future__ import annotations

from contextlib import closing

from mcore_bridge.engines.joint_group import JointGroup
from mcore_bridge.errors import TransferError
from mcore_bridge.weights.engine.composed import MemoryWriter
from mcore_bridge.weights.engine.mapped_engine import MappedEngine
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

    def exchange(self, version: int) -> None:
        """Take one round, together with all members of the group.

        Raises:
            TransferError: when the engine cannot take it. The round of other members goes on.
        """
        assert self._program is not None
        problem = None
        try:
            if self._writer is None:
                self._engine.begin(self._specs)
            else:
                self._writer.memory = self._engine.announce(self._specs)
        except TransferError as error:  # other members wait for this one
            problem = error
        into = self._writer.begin if self._writer and not problem else new_tensors
        with self._group.watched(), closing(run_messages(self._program, self._group, {}, into=into)) as messages:
            for pairs in messages:
                if problem is not None:
                    break
                if group := [*pairs]:
                    self._engine.write(group)
        if problem is not None:
            raise problem
        if self._writer is not None:
            self._writer.end(self._group.device)
        self._engine.complete(version)

    def close(self) -> None:
        """Leave the group, which breaks it."""
        self._group.close()
