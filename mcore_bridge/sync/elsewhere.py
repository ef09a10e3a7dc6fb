"""Workers on other machines: they and the ranks of a replica are one group, and take part in one export.

What a worker needs of the shard of a rank goes from this rank straight to the worker. No rank gathers it.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import torch

from mcore_bridge.engines.joint_group import JointGroup, break_store, open_store
from mcore_bridge.errors import BridgeError, TransferError
from mcore_bridge.sync.routes import Route, WorkerKey
from mcore_bridge.weights.agreement import Export, open_export
from mcore_bridge.weights.engine.comparison import Compared
from mcore_bridge.weights.model_chunks import Models, groups_of
from mcore_bridge.weights.plan.target import Target
from mcore_bridge.weights.transfer.collectives import Group
from mcore_bridge.weights.transfer.executor import run_program
from mcore_bridge.weights.transfer.failures import raise_on_all
from mcore_bridge.weights.transfer.program import Program

Routes = Mapping[WorkerKey, Route]
"""This rank's routes to workers elsewhere."""
Answer = Compared | TransferError | None
"""What a worker found in a comparison, its error, or None after a sync."""


class Elsewhere:
    """The workers elsewhere that the ranks of one replica serve.

    Args:
        models, options: as for ``NoRoute``.
        device: where this rank has its memory.
        host: the number under which workers reach this rank's machine.
        seconds: how long one member of the group waits for another.
    """

    def __init__(
        self, models: Models, options: Mapping[str, Any], device: torch.device, host: str, seconds: float
    ) -> None:
        self._models, self._options = models, options
        self._device, self._host, self._seconds = device, host, seconds
        self._replica = Group.of_replica(groups_of(models))
        self._group: JointGroup | None = None
        self._store: Any = None  # stays until the next one: another rank may still have to connect to it
        self._program: Program | None = None
        self._targets: dict[WorkerKey, Target] = {}
        """What each worker of the replica gets, in the order in which they follow the ranks."""
        self.siblings: dict[WorkerKey, WorkerKey] = {}
        """For each of this rank's workers to which a sibling passes weights on, this sibling."""
        self._own: dict[WorkerKey, Route] | None = {}
        """This rank's workers in the group; None after it broke."""
        self.members = self._replica.members
        """The ranks of the replica in the world."""

    def has_changed(self, routes: Routes) -> bool:
        """Whether the group has other workers of this rank than these, or has broken.

        A worker that another trainer has served in between has a new route, and has left the group.
        """
        return self._own != dict(routes)

    def exchange(self, routes: Routes, version: int, *, is_new: bool, compares: bool) -> dict[WorkerKey, Answer]:
        """Export a round to all workers of the replica. Returns what each of this rank's workers answers, or its error.

        Args:
            is_new: whether any rank of the replica needs another group.
            compares: whether the workers only compare the round with what they hold.

        Raises:
            ExportError, MappingError: as ``iter_hf_weights``.
        """
        try:
            if is_new:
                self._join(routes)
        except TransferError as error:
            self.close()
            return {key: route.line.failed(error) for key, route in routes.items()}
        if self._group is None:
            return {}
        targets, is_done = tuple(self._targets.values()), False
        try:
            export = open_export(self._models, None, "lm", **self._options, target="nothing", guests=targets)
            try:
                self._run(self._group, export, routes, (version, compares))
            except (BridgeError, RuntimeError) as error:
                return {key: route.line.failed(error) for key, route in routes.items()}
            is_done = True
        finally:
            if not is_done:  # workers leave the group after a round that failed
                self.close()
        answers: dict[WorkerKey, Answer] = {}
        for key, route in routes.items():
            try:
                answers[key] = route.line.answer()
            except TransferError as error:
                answers[key] = error
        return answers

    def _join(self, routes: Routes) -> None:
        """Make a group of all ranks of the replica and all workers."""
        self.close()
        own = {key: route.target for key, route in routes.items()}
        of_ranks = self._replica.all_gather_object(own)
        self._targets = dict(sorted((item for of_rank in of_ranks for item in of_rank.items()), key=itemgetter(0)))
        self._own = dict(routes)
        if not self._targets:
            return
        with raise_on_all(self._replica, kind=TransferError):
            store = open_store(self._host, self._seconds) if self._replica.rank == 0 else None
        host, port = self._replica.all_gather_object((self._host, store.port if store else 0))[0]
        with raise_on_all(self._replica, kind=TransferError):  # all ranks have the group, or none goes on with it
            self._store = store or open_store(host, self._seconds, port)
            self._connect((host, port), routes)

    def _connect(self, address: tuple[str, int], routes: Routes) -> None:
        size = self._replica.size + len(self._targets)
        try:
            for number, key in enumerate(self._targets, self._replica.size):
                if key in routes:
                    routes[key].line.send("join", (*address, number, size, self._seconds))
        except TransferError:
            break_store(self._store)  # other ranks wait
            raise
        pipes = [route.line.pipe for route in routes.values()]
        self._group = JointGroup(self._store, self._replica.rank, size, self._device, self._seconds, pipes)
        for route in routes.values():
            route.line.answer()

    def _run(self, group: JointGroup, export: Export, routes: Routes, what: tuple[int, bool]) -> None:
        try:
            if export.program is not self._program:
                keys = [*self._targets]
                for number, key in enumerate(keys):
                    if key in routes:
                        program = export.guest_program(number)
                        routes[key].line("follow", program)
                        if (rank := program.plan.fed_by) is not None:
                            self.siblings[key] = keys[rank - self._replica.size]
                self._program = export.program
            for route in routes.values():
                route.line.send("exchange", what)
        except TransferError:  # other ranks wait
            group.close()
            raise
        with group.watched():
            for _ in run_program(export.program, group, export.held):
                pass

    def close(self) -> None:
        """Break the group, if there is one."""
        if self._group is not None:
            self._group.close()
        self._group = self._program = self._own = None
        self._targets, self.siblings = {}, {}
