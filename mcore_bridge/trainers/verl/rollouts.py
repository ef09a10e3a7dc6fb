"""The rollouts of a verl job as the engines of one ``WeightSync``. This file needs no verl.

Rank 0 of the trainer cannot call a rollout's server, and the processes that can are not in the trainer. So at each
round these *callers* connect to rank 0, which gives them the call to pass on, and waits for their answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from mcore_bridge.engines.channel import Address, Listener, own_host, tell
from mcore_bridge.errors import ConfigError, TransferError, describe

if TYPE_CHECKING:
    from mcore_bridge.sync.reports import SyncReport
    from mcore_bridge.sync.weight_sync import WeightSync
    from mcore_bridge.trainers.weight_export import WeightExport

logger = logging.getLogger(__name__)
Call = Callable[[Mapping[str, Any]], Awaitable[object]]
"""Has all workers of a rollout run ``Extension.receive_from_trainer``."""
BACKEND = "mcore_bridge"
"""Of ``checkpoint_engine.backend``, and the key of our settings in ``checkpoint_engine.engine_kwargs``."""
TIMEOUT = 600.0
"""Seconds."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the callers of a round meet rank 0, and how many of them come."""

    address: Address
    num_callers: int


class Caller:
    """A process of the job that may be able to call a rollout. It meets rank 0 once in each round."""

    def __init__(self) -> None:
        self._key = uuid4().hex
        self.calls: bool | None = None
        """Whether it calls a rollout; None before it is known."""

    def pass_on(self, address: Address, call: Call | None) -> Awaitable[None]:
        """Pass one call of rank 0 on to a rollout, in a thread that has started when this returns.

        Args:
            address: where rank 0 listens.
            call: calls the rollout, in a loop of that thread; None if another process does it.

        Raises:
            TransferError: when rank 0 has ended, while the answer is awaited.
            Exception: what the call raises; rank 0 gets its message.
        """
        is_known, self.calls = self.calls is not None, call is not None
        loop = asyncio.get_running_loop()
        if call is not None or not is_known:
            return loop.run_in_executor(None, self._meet, address, call)
        nothing = loop.create_future()  # rank 0 no longer expects this process
        nothing.set_result(None)
        return nothing

    def _meet(self, address: Address, call: Call | None) -> None:
        with address.dial() as pipe:
            tell(pipe, (self._key, call is not None))
            if call is None:
                return
            try:
                info = pipe.recv()
            except (OSError, EOFError):
                raise TransferError(
                    "expected a call of the trainer's rank 0, found that it has left; its log says why"
                ) from None
            try:
                asyncio.run(_finished(call(info)))
            except Exception as error:
                tell(pipe, TransferError(describe(error)))
                raise
            tell(pipe, None)


@dataclass(frozen=True)
class Round:
    """A round of a ``WeightSync``, in the place of the tensors that other backends receive."""

    caller: Caller
    address: Address

    async def join(self, call: Call | None) -> None:
        """Take part, as ``Caller.pass_on``."""
        await self.caller.pass_on(self.address, call)

    def __iter__(self) -> Iterator[Any]:
        raise ConfigError(
            f"checkpoint_engine.backend={BACKEND} writes into vLLM, and yields no tensors to other rollouts: set "
            "rollout.name=vllm, or another backend"
        )


async def _finished(answer: Awaitable[object]) -> None:
    await answer


class _Rollout:
    """A rollout as ``WeightSync`` calls it. It stays the same from round to round, while its pipe is new in each."""

    def __init__(self) -> None:
        self.pipe: Connection | None = None

    def __call__(self, info: Mapping[str, Any]) -> None:
        assert self.pipe is not None
        with self.pipe as pipe:
            tell(pipe, dict(info))
            answer = pipe.recv()
        if isinstance(answer, Exception):
            raise answer


class Rollouts:
    """The trainer's side, on each rank. Its ``send`` is one round.

    Args:
        timeout: seconds that callers may take to come, and engines for one answer.
    """

    def __init__(self, timeout: float = TIMEOUT) -> None:
        self._timeout = timeout
        self._listener: Listener | None = None
        self._rollouts: dict[str, _Rollout] = {}
        self._sync: WeightSync | None = None
        self._of: object = None

    def address(self) -> Address:
        """Where callers connect: for rank 0 alone."""
        if self._listener is None:
            self._listener = Listener(own_host())
        return self._listener.address

    def meeting(self, calls: bool) -> Meeting:
        """A meeting of callers on the trainer's own ranks. All ranks call this together.

        Args:
            calls: whether this rank calls a rollout.
        """
        from mcore_bridge.weights.transfer.collectives import Group

        group = Group.of_trainer()
        addresses = group.all_gather_object(self.address() if group.rank == 0 else None)
        num_callers = sum(group.all_gather_object(calls))
        group.close()
        assert addresses[0] is not None
        return Meeting(addresses[0], num_callers)

    def send(self, export: WeightExport, version: int | None, num_callers: int) -> SyncReport:
        """Send the models of an export to all rollouts whose callers come. All ranks call this together.

        Raises:
            ConfigError: ``export`` is the base of a model with adapters, without them.
            TransferError: as ``WeightSync``, and when callers do not come in time.
        """
        from mcore_bridge.weights.model_chunks import chunks_of, modules_of

        if export.merged is False and hasattr(chunks_of(export.models)[0], "bridge_adapters"):
            raise ConfigError("rollouts on other GPUs get merged weights: set lora.merge=True")
        which = (tuple(map(id, modules_of(export.models))), export.merged)
        if which != self._of:
            from mcore_bridge.sync.weight_sync import WeightSync

            if self._sync is not None:
                self._sync.close()
            self._sync = WeightSync(export.models, timeout=self._timeout, merged=export.merged)
            self._of = which
        assert self._sync is not None
        if self._listener is not None:
            self._sync.set_engines(self._engines(num_callers))
        report = self._sync(version)
        logger.info("%s", report)
        return report

    def _engines(self, num_callers: int) -> Sequence[Callable[[Mapping[str, Any]], None]]:
        """The rollouts of this round. If callers are missing, one engine that says so, on all ranks."""
        pipes: dict[str, tuple[Connection, bool]] = {}
        try:
            self._arrive(num_callers, pipes)
        except Exception as error:  # any error, since other ranks wait for this one
            problem = error
            for pipe, _ in pipes.values():
                pipe.close()
        else:
            calling = {key: pipe for key, (pipe, calls) in pipes.items() if calls}
            self._rollouts = {key: self._rollouts.get(key) or _Rollout() for key in calling}
            for key, pipe in calling.items():
                self._rollouts[key].pipe = pipe
            return list(self._rollouts.values())

        def fail(info: Mapping[str, Any]) -> None:
            raise problem

        return [fail]

    def _arrive(self, num_callers: int, pipes: dict[str, tuple[Connection, bool]]) -> None:
        """Accept callers, each with whether it calls a rollout. The last connection of a caller counts."""
        assert self._listener is not None
        deadline = time.monotonic() + self._timeout
        while len(pipes) < num_callers:
            left = deadline - time.monotonic()
            if left < 0:
                raise TransferError(
                    f"expected {num_callers} processes of rollouts at {self._listener.address.host} within "
                    f"{self._timeout:.0f} s, found {len(pipes)}; their logs say why"
                )
            if (pipe := self._listener.accept(left)) is not None:
                with suppress(OSError, EOFError):  # a caller that has ended since
                    key, calls = pipe.recv()
                    pipes[key] = pipe, calls

    def close(self) -> None:
        """Let go of all rollouts."""
        with suppress(Exception):
            if self._sync is not None:
                self._sync.close()
        if self._listener is not None:
            self._listener.close()
        self._sync = self._listener = self._of = None
