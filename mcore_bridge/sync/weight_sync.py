"""``WeightSync``: the weights of a model into all its engines, each by the fastest way that works, at every step."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import chain, count
from threading import TIMEOUT_MAX
from types import TracebackType
from typing import Any

import torch

from mcore_bridge.arguments import LEAST_0, Kind, instance_of, problem_of, require
from mcore_bridge.engines.channel import HANDSHAKE, Listener, WorkerLine, own_host
from mcore_bridge.engines.engine_worker import Identity
from mcore_bridge.errors import TransferError, describe
from mcore_bridge.machine import this_machine, uncollected
from mcore_bridge.rules.mapping import Dialect
from mcore_bridge.sync.clients import call_of
from mcore_bridge.sync.roll_call import Place, RollCall, Served
from mcore_bridge.sync.routes import WAYS, NoRoute, Route, Transport
from mcore_bridge.weights.ipc.shared_memory import gpu_of
from mcore_bridge.weights.manifest import manifest
from mcore_bridge.weights.model_chunks import Models, modules_of
from mcore_bridge.weights.transfer.collectives import Group
from mcore_bridge.weights.transfer.failures import raise_failures, raise_on_all

_ALL = "expected all ranks to go on, found"
_SECONDS = Kind(
    f"a number of seconds above 0 and up to {TIMEOUT_MAX:.0f}",
    lambda value: isinstance(value, int | float) and 0 < value <= TIMEOUT_MAX,
)
_HOST = Kind("a name or number of this machine", lambda value: isinstance(value, str) and value != "")
_TRANSPORT = Kind(f"one of {', '.join(WAYS)}, or None", lambda value: value is None or value in WAYS)


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What one worker of an engine got in a round."""

    engine: int
    """The number of the engine, as ``WeightSync`` was given them."""
    rank: int
    """The worker's number among those of the engine."""
    name: str
    """Engine, release, model, and the worker's place in the engine's mesh."""
    trainer: int
    """The trainer rank that served the worker."""
    transport: Transport | None
    """``"shards"``, ``"pull"``, ``"ring"`` or ``"network"``; None if no way was found."""
    reason: str
    """Why no faster transport was taken; empty for the fastest."""
    num_bytes: int
    """Bytes of HF tensors, or of the slices of HF tensors that the worker uses."""
    seconds: float
    """From the begin of the round on the trainer rank until this worker had the weights."""
    problem: str = ""
    """What went wrong; empty if the worker has the new weights."""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What a round did. It is equal on all ranks of the trainer, but for ``seconds``."""

    version: int
    seconds: float
    """How long the call took on this rank."""
    workers: tuple[WorkerReport, ...]

    def __str__(self) -> str:
        """One line for a log."""
        ways = sorted({f"{worker.transport}" for worker in self.workers})
        total = sum(worker.num_bytes for worker in self.workers) / 1e9
        return (
            f"version {self.version} in {self.seconds:.3f} s: {len(self.workers)} workers, {total:.2f} GB by "
            f"{', '.join(ways)}"
        )


class WeightSync:
    """The engines of a trainer. Each call sends all weights to all of them.

    Every rank of the trainer makes one, and calls it at each step. Rank 0 calls the engines, whose workers then connect
    to the trainer. Each worker is served by the nearest trainer rank: on the same GPU, on the same machine, or
    elsewhere. In the first round a map of each engine's loader is made, which takes some reloads, or a kept one is
    proven. The environment variable MCORE_BRIDGE_CACHE names the folder of kept maps.

    Args:
        models: this rank's chunks, wrapped or not.
        engines: one client or a list, on rank 0; other ranks may pass nothing. A client is an ``LLM`` of vLLM, or one
            of vLLM's clients for weight transfer, or the address of a vLLM server. It may also be a connection to a
            process that calls ``EngineWorker.receive``, or a function of ``info`` that has all workers call it.
        transport: the only way to use, for a test or a measurement; None chooses for each worker.
        loads: whether engines take weights by their own loaders, without a map.
        address: the number under which engines reach this rank's machine; None finds it.
        timeout: seconds that an engine may take for one answer. The first round makes maps within one answer.
        dialect, merged: as for ``iter_hf_weights``.

    Raises:
        TransferError: on every rank, when an argument is wrong on one.

    Example:
        >>> from mcore_bridge.engines import EngineWorker
        >>> model = torch.nn.Linear(48, 96, bias=False)               # an engine with one worker, in this process
        >>> load = lambda pairs: model.weight.data.copy_(dict(pairs)["lm_head.weight"])
        >>> worker = EngineWorker(model, load, name="example, worker 0 of 1")
        >>> with mb.WeightSync(models, worker.receive) as sync:
        ...     report = sync()
        >>> report.version, report.workers[0].transport
        (1, 'ring')
        >>> torch.equal(model.weight, mb.to_hf_state_dict(models)["lm_head.weight"])
        True
    """

    def __init__(
        self,
        models: Models,
        engines: object = (),
        *,
        transport: Transport | None = None,
        loads: bool = False,
        address: str | None = None,
        timeout: float = 600.0,
        dialect: Dialect | None = None,
        merged: bool | None = None,
    ) -> None:
        self._models, self._loads, self._seconds = models, loads, timeout
        self._allowed: tuple[Transport, ...] = WAYS if transport is None else (transport,)
        self._options: dict[str, Any] = {"dialect": dialect, "merged": merged}
        self._group = Group.of_trainer()
        self._routes: dict[tuple[int, int], Route] = {}
        self._roll_call: RollCall | None = None
        self.version = 0
        """The version of the last round."""
        wrong = problem_of(
            transport=(transport, _TRANSPORT),
            loads=(loads, instance_of("True or False", bool)),
            address=(address, _HOST.or_none()),
            timeout=(timeout, _SECONDS),
        )
        self._clients: dict[int, object] = {}
        self._numbers = count()
        with raise_on_all(self._group, _ALL, TransferError):
            modules_of(models)
            if wrong:
                raise TransferError(wrong)
            self._host = address or own_host()
            self._listener = Listener(self._host)
            if self._group.rank == 0:
                self._roll_call = RollCall({}, self._listener, timeout)
                self.set_engines(engines)
        self._device = self._own_device()
        own = Place(this_machine(), gpu_of(self._device), self._listener.address)
        places = self._group.all_gather_object(own)
        if self._roll_call is not None:
            self._roll_call.places = places
        self._specs = tuple(manifest(models, **self._options))

    def set_engines(self, engines: object) -> None:
        """Serve these engines from the next round on: those that have come, and no longer those that have gone.

        Only rank 0 calls this. An engine that was served before keeps its connections.

        Args:
            engines: one client or a list, as for ``WeightSync``.

        Raises:
            TransferError: when one of them is no client.
        """
        if self._roll_call is None:
            raise TransferError(f"expected rank 0 to name the engines, found rank {self._group.rank}")
        clients = {}
        for engine in list(engines) if isinstance(engines, list | tuple) else [engines]:
            known = next((number for number, client in self._clients.items() if client == engine), None)
            clients[next(self._numbers) if known is None else known] = engine
        self._roll_call.calls = {number: call_of(engine) for number, engine in clients.items()}
        self._clients = clients

    @uncollected()
    def __call__(self, version: int | None = None) -> SyncReport:
        """Send all weights to all engines. All ranks of the trainer call this together.

        Args:
            version: a number for these weights, which the engines report; None counts rounds. That of rank 0 counts.

        Raises:
            TransferError: on every rank, when an engine did not get all weights. The message names engine, worker and
                cause. The weights of this engine are then half old and half new; other engines have the new ones. The
                next call sends everything again.
            ExportError, MappingError: as ``iter_hf_weights``.
        """
        start = time.perf_counter()
        version, roster, absent = self._called(version)
        queues: dict[int, list[Served]] = {}
        for served in roster:
            queues.setdefault(served.trainer, []).append(served)
        mine = queues.get(self._group.rank, [])
        self._close_all({*self._routes} - {served.worker.place for served in mine if not served.is_new})
        reports, failure = [], None
        try:
            if any(served.is_new for served in roster):
                with raise_on_all(self._group, _ALL, TransferError):
                    self._connect(mine)
            for row in range(max(map(len, queues.values()), default=0)):
                is_new = any(served.is_new for queue in queues.values() for served in queue[row : row + 1])
                reports += self._send(mine[row].worker if row < len(mine) else None, is_new, version, start)
        except Exception as error:
            failure = error
        problem = "" if failure is None else describe(failure)
        gathered = self._group.all_gather_object((tuple(reports), problem))
        parts = chain.from_iterable(part for part, _ in gathered)
        workers = tuple(sorted(parts, key=lambda report: (report.engine, report.rank)))
        absent = {**self._ended(workers, [text for _, text in gathered], absent), **absent}
        if failure is not None:
            raise failure
        raise_failures([text for _, text in gathered], _ALL, TransferError)
        wrong = [f"{worker.name} of engine {worker.engine}: {worker.problem}" for worker in workers if worker.problem]
        wrong += [f"engine {engine}: {reason}" for engine, reason in sorted(absent.items())]
        if wrong:
            raise TransferError(
                f"expected all engines to have version {version}, found {len(wrong)} failures: {'; '.join(wrong)}. "
                "Their weights may be half old and half new: sync again before they sample"
            )
        self.version = version
        return SyncReport(version, time.perf_counter() - start, workers)

    def _called(self, version: int | None) -> tuple[int, list[Served], dict[int, str]]:
        """The version of the round, the workers of all engines that have come, and why engines did not."""
        answer: tuple[int, list[Served], dict[int, str]] | str = ""
        if self._roll_call is not None:
            try:
                require(TransferError, version=(version, LEAST_0.or_none()))
                number = self.version + 1 if version is None else version
                answer = (number, *self._roll_call.begin(number))
            except Exception as error:  # other ranks wait for it
                answer = describe(error)
        answer = self._group.all_gather_object(answer)[0]
        if isinstance(answer, str):
            raise TransferError(answer)
        return answer

    def _connect(self, mine: Sequence[Served]) -> None:
        """Accept the workers that are new on this rank."""
        due = {served.worker.place: served.worker for served in mine if served.is_new}
        deadline = time.monotonic() + self._seconds
        while due:
            pipe = self._listener.accept(max(deadline - time.monotonic(), 0.0))
            if pipe is None and time.monotonic() > deadline:
                raise TransferError(
                    f"expected {[worker.name for worker in due.values()]} to connect to {self._host} within "
                    f"{self._seconds:.0f} s, found that they did not; pass an address that the engines reach"
                )
            if pipe is None or not pipe.poll(HANDSHAKE):
                continue
            worker = due.pop(pipe.recv())
            self._routes[worker.place] = Route(
                self._models,
                self._options,
                line=WorkerLine(pipe, worker.name, self._seconds),
                device=self._device,
                allowed=self._allowed,
                is_near=worker.is_on(this_machine()),
                host=self._host,
            )

    def _send(self, worker: Identity | None, is_new: bool, version: int, start: float) -> list[WorkerReport]:
        """One export, into at most one worker for each rank. All ranks take part."""
        idle = NoRoute(self._models, self._options)
        route = idle if worker is None else self._routes[worker.place]
        problem = ""
        if is_new:
            problem = _problem_of(lambda: route.find(self._specs, self._loads))
            specs = manifest(self._models, **self._options, target=route.target)
            problem = problem or _problem_of(lambda: route.open(specs))
        if problem:
            idle.send(version)
        else:
            problem = _problem_of(lambda: route.send(version))
        if worker is None:
            return []
        taken = self._routes[worker.place]
        figures = (taken.transport, taken.reason, taken.num_bytes, time.perf_counter() - start, problem)
        return [WorkerReport(worker.engine, worker.rank, worker.name, self._group.rank, *figures)]

    def _ended(
        self, workers: Sequence[WorkerReport], problems: Sequence[str], absent: dict[int, str]
    ) -> dict[int, str]:
        """Tell all workers that the round has ended; which engines failed in their own way."""
        failed = {worker.engine: worker.problem for worker in workers if worker.problem}
        self._close_all({place for place in self._routes if place[0] in failed or any(problems)})
        answer: dict[int, str] = {}
        if self._roll_call is not None:
            everywhere = next((text for text in problems if text), "")
            answer = self._roll_call.end(everywhere, {**absent, **failed})
        by_engine = self._group.all_gather_object(answer)[0]
        return {number: text for number, text in by_engine.items() if number not in failed}

    def _own_device(self) -> torch.device:
        on_gpu = torch.cuda.is_available() and any(
            p.is_cuda for chunk in modules_of(self._models) for p in chunk.parameters()
        )
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def _close_all(self, places: Collection[tuple[int, int]]) -> None:
        for place in places:
            self._routes.pop(place).close()

    def close(self) -> None:
        """Let go of all engines."""
        self._close_all({*self._routes})
        if self._roll_call is not None:
            self._roll_call.close()
        self._listener.close()
        self._group.close()

    def __enter__(self) -> WeightSync:
        """Close at the end of a block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _problem_of(action: Callable[[], None]) -> str:
    """Run it; the message of an error that one worker alone has."""
    try:
        action()
    except TransferError as error:
        return str(error)
    return ""
