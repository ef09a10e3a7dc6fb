"""Rank 0 calls all engines, waits until each worker of them has come, and tells each which trainer rank serves it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from threading import Thread
from typing import Any

from mcore_bridge.engines.channel import Address, Listener, tell
from mcore_bridge.engines.engine_worker import Identity, Invitation
from mcore_bridge.errors import describe, plural
from mcore_bridge.sync.clients import Call

_Here = tuple[Identity, Connection, bool]
"""A worker that has come, its connection, and whether a trainer rank already serves it."""
_PAUSE = 0.2
"""Seconds after which rank 0 looks again whether a call has failed."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a trainer rank is, and where it listens."""

    machine: str
    gpu: str
    address: Address


@dataclass(frozen=True, slots=True)
class Served:
    """A worker of an engine, and the trainer rank that serves it."""

    worker: Identity
    trainer: int
    is_new: bool
    """Whether the worker connects to that rank in this round."""


class RollCall:
    """The engines of a trainer, as rank 0 reaches them.

    Args:
        calls: a function for each engine, by the engine's number.
        listener: where workers connect.
        seconds: how long workers may take to come.
    """

    def __init__(self, calls: Mapping[int, Call], listener: Listener, seconds: float) -> None:
        self.calls, self._listener, self._seconds = calls, listener, seconds
        self.places: Sequence[Place] = ()
        """Of all trainer ranks."""
        self._pipes: set[Connection] = set()
        self._in_round: dict[Connection, Identity] = {}
        """The workers that wait for the end of this round."""
        self._served: dict[tuple[int, int], int] = {}
        self._threads: dict[int, _Calling] = {}

    def begin(self, version: int, left_out: Collection[int] = ()) -> tuple[list[Served], dict[int, str]]:
        """Call all engines but some. Returns the workers that have come, and why engines failed."""
        address, seconds = self._listener.address, self._seconds
        self._threads = {
            number: _Calling(call, Invitation(address, number, seconds).to_json(), version)
            for number, call in self.calls.items()
            if number not in left_out
        }
        here: dict[int, dict[int, _Here]] = {number: {} for number in self._threads}
        failed: dict[int, str] = {}
        deadline = time.monotonic() + seconds
        while waiting := [n for n in here if n not in failed and not _is_whole(here[n])]:
            for ready in wait([self._listener.socket, *self._pipes], _PAUSE):
                self._hear(ready, here)
            for number in waiting:
                came = len(here[number])
                if self._threads[number].is_over:
                    failed[number] = self._threads[number].problem or _too_early(came)
                elif time.monotonic() > deadline:
                    failed[number] = f"{came} of its workers came within {seconds:.0f} s"
        present = [here[number][rank] for number in here if number not in failed for rank in sorted(here[number])]
        return self._assigned(present), failed

    def _hear(self, ready: Any, here: Mapping[int, dict[int, _Here]]) -> None:
        if ready is self._listener.socket:
            if (pipe := self._listener.accept(_PAUSE)) is not None:
                self._pipes.add(pipe)
            return
        try:
            identity, is_connected = ready.recv()
        except (OSError, EOFError):
            self._pipes.remove(ready)
            ready.close()
            return
        if identity.engine in here:
            self._in_round[ready] = identity
            here[identity.engine][identity.rank] = identity, ready, is_connected

    def _assigned(self, present: Sequence[_Here]) -> list[Served]:
        """Each worker keeps its trainer rank. A new one gets the nearest rank, of those the one with the fewest."""
        known = {identity.place for identity, _, is_connected in present if is_connected} & self._served.keys()
        self._served = {place: self._served[place] for place in known}
        load = Counter(self._served.values())
        served = []
        for identity, pipe, _ in present:
            is_new = identity.place not in known
            if is_new:
                distances = [_distance(identity, place) for place in self.places]
                ranks = range(len(distances))
                self._served[identity.place] = min(ranks, key=lambda rank: (distances[rank], load[rank], rank))
                load[self._served[identity.place]] += 1
            rank = self._served[identity.place]
            served.append(Served(identity, rank, is_new))
            with suppress(OSError):  # its trainer rank will find that it has ended
                tell(pipe, ("serve", self.places[rank].address if is_new else None))
        return served

    def end(self, everywhere: str, problems: Mapping[int, str]) -> dict[int, str]:
        """End the round of all workers that have come; what each engine's own call says of it, if it failed.

        Args:
            everywhere: what went wrong for all engines; empty if nothing did.
            problems: for each engine that failed what went wrong.
        """
        for pipe, identity in self._in_round.items():
            with suppress(OSError):  # it has ended
                tell(pipe, ("end", problems.get(identity.engine, everywhere)))
        self._in_round.clear()
        failed = {}
        for number, thread in self._threads.items():
            thread.join(_PAUSE if everywhere or number in problems else self._seconds)
            if thread.is_alive():
                failed[number] = f"its call did not return within {self._seconds:.0f} s"
            elif thread.problem:
                failed[number] = thread.problem
        return failed

    def close(self) -> None:
        """Let go of all workers."""
        for pipe in self._pipes:
            pipe.close()
        self._pipes.clear()


class _Calling(Thread):
    """One call to an engine, which returns only when the round has ended."""

    def __init__(self, call: Call, info: Mapping[str, Any], version: int) -> None:
        super().__init__(daemon=True)
        self._call, self._info, self._version = call, info, version
        self.problem, self.is_over = "", False
        self.start()

    def run(self) -> None:
        """Call."""
        try:
            self._call(self._info, self._version)
        except Exception as error:
            self.problem = describe(error)
        finally:
            self.is_over = True


def _too_early(came: int) -> str:
    return (
        f"its call returned, and {plural(came, 'worker')} had come: every worker of the engine must hand info to "
        "EngineWorker.receive, and the call must wait for all of them"
    )


def _is_whole(workers: Mapping[int, _Here]) -> bool:
    return any(len(workers) == identity.size for identity, _, _ in workers.values())


def _distance(worker: Identity, place: Place) -> int:
    """0 on the GPU of a trainer rank, 1 on its machine, 2 elsewhere."""
    if not worker.is_on(place.machine):
        return 2
    return 0 if worker.gpu == place.gpu else 1
