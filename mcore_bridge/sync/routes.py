"""The ways in which a trainer rank brings a round to one worker of an engine, from the fastest to the most general."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import partial
from typing import Any, Literal

import torch

from mcore_bridge.engines.channel import WorkerLine
from mcore_bridge.errors import TransferError
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.agreement import Export, Look, open_plain
from mcore_bridge.weights.bound import bind
from mcore_bridge.weights.engine.across_ranks import AcrossRanks, WrittenByRanks
from mcore_bridge.weights.engine.comparison import Compared
from mcore_bridge.weights.engine.pull_writer import PulledByWorkers, PullWriter
from mcore_bridge.weights.engine.writer import EngineWriter, write_export
from mcore_bridge.weights.export import iter_hf_weights
from mcore_bridge.weights.ipc.buckets import plan_buckets
from mcore_bridge.weights.ipc.sender import BufferRing
from mcore_bridge.weights.manifest import Manifest
from mcore_bridge.weights.model_chunks import Models
from mcore_bridge.weights.plan.engine_map import EngineMap
from mcore_bridge.weights.plan.target import Target

Transport = Literal["shards", "pull", "ring", "network"]
"""``shards``: the trainer writes its shards into the engine's memory. ``pull``: the engine's process opens the memory
of the shards, and copies them. ``ring``: slots with HF tensors, which the engine's process opens. ``network``: each
rank sends what the worker needs of its shards, by NCCL or gloo (``Elsewhere``)."""
WAYS: tuple[Transport, ...] = ("shards", "pull", "ring", "network")
"""From the fastest to the slowest."""
WorkerKey = tuple[int, int]
"""The number of an engine, and the rank of a worker in it."""


ACROSS: dict[Transport, type[AcrossRanks]] = {"shards": WrittenByRanks, "pull": PulledByWorkers}
"""How a round goes without messages between ranks, if all workers have this transport. These need a map."""


class NoRoute:
    """In place of a route on a rank that serves no worker in an export: it only sends to other ranks.

    Args:
        models: this rank's chunks.
        options: further arguments of ``iter_hf_weights``.
    """

    target: Target = "nothing"

    def __init__(self, models: Models, options: Mapping[str, Any]) -> None:
        self._models, self._options = models, options

    def find(self, specs: tuple[TensorSpec, ...], loads: bool) -> None:
        """Nothing to find."""

    def open(self, manifest: Manifest) -> None:
        """Nothing to open."""

    def send(self, version: int, across: AcrossRanks | None = None) -> None:
        """Take part in an export.

        Args:
            across: as for ``write_export``.
        """
        write_export(self._models, partial(self._prepared, "nothing"), across=across)

    def _prepared(self, target: Target, look: Look | None) -> Export:
        return open_plain(self._models, None, "lm", look, target=target, **self._options)

    def compare(self, manifest: Manifest) -> Compared | None:
        """Take part in an export with which another worker compares its weights."""
        NoRoute.send(self, 0)
        return None


def of_model(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that say what the tensors of a model are, without the format in which they leave."""
    return {name: value for name, value in options.items() if name != "quantize"}


class Route(NoRoute):
    """The way to one worker. Its transport is chosen when the worker connects, and again after a round that failed.

    A route by ``network`` sends nothing itself.

    Args:
        models, options: as for ``NoRoute``.
        line: the connection to the worker.
        device: where this trainer rank has its memory.
        allowed: the transports to try, in this order.
        is_near: whether the worker's process is on this machine.
    """

    def __init__(
        self,
        models: Models,
        options: Mapping[str, Any],
        *,
        line: WorkerLine,
        device: torch.device,
        allowed: tuple[Transport, ...],
        is_near: bool,
    ) -> None:
        super().__init__(models, options)
        self.line, self._device = line, device
        self._allowed = allowed if is_near else tuple(way for way in allowed if way == "network")
        self.transport: Transport | None = None
        self._reason = "" if is_near else "the engine's process is on another machine"
        self._messages = ""
        """Why ranks exchanged messages in the last round, if a process could not open the memory of another one."""
        self.num_bytes = 0
        self._map: EngineMap | None = None
        self._writer: EngineWriter | PullWriter | None = None
        self._announce: Callable[[], None] = partial(line.send, "share")
        """Begins a round: the worker looks up its memory while the ranks agree on a plan."""
        self._is_announced = False
        self._ring: BufferRing | None = None

    def find(self, specs: tuple[TensorSpec, ...], loads: bool) -> None:
        """Have the worker make a map of its loader, or take weights by the loader itself."""
        if self.transport:
            return
        if not loads:
            try:
                self._map = self.line("map", specs)
                self.target = self._map
                return
            except TransferError as error:
                self._add(f"no map: {error}")
        self.line("loader", specs)
        self.target, self._map = "everything", None
        self._allowed = tuple(way for way in self._allowed if way not in ACROSS)

    def open(self, manifest: Manifest) -> None:
        """Choose the first transport that works.

        Args:
            manifest: what an export with ``target`` yields on this rank.
        """
        if self.transport:
            return
        self.num_bytes = manifest.num_bytes
        for way in self._allowed:
            try:
                getattr(self, f"_open_{way}")(manifest)
            except TransferError as error:
                self._add(f"{way}: {error}")
                continue
            self.transport = way
            return
        raise TransferError(f"expected a way to {self.line.worker}, found none: {self.reason}")

    def _add(self, reason: str) -> None:
        self._reason = "; ".join(filter(None, (self._reason, reason)))

    @property
    def reason(self) -> str:
        """Why no faster way was taken; empty for the fastest one."""
        return "; ".join(filter(None, (self._reason, self._messages)))

    def _open_shards(self, manifest: Manifest) -> None:
        self._announce()
        self._shared()
        self._is_announced = True

    def _shared(self) -> EngineWriter | PullWriter:
        """The writer, after the worker's answer that it may write. It opens the engine's memory if that has moved."""
        assert self._map is not None
        handles = self.line.answer()
        if handles is not None:
            if self._writer is not None:
                self._writer.close()
            self._writer = EngineWriter(self._map, handles)
        return self._opened()

    def _opened(self) -> EngineWriter | PullWriter:
        assert self._writer is not None
        return self._writer

    def _open_pull(self, manifest: Manifest) -> None:
        assert self._map is not None
        tensors = bind(self._models, **of_model(self._options)).tensors
        writer = PullWriter(self._map, self.line)
        specs = tuple(TensorSpec.of(spec.name, spec) for spec in manifest)
        writer.can_encode = self.line("pull", specs, writer.open(tensors.values()))
        self._writer, self._announce, self._is_announced = writer, writer.announce, True

    def _open_ring(self, manifest: Manifest) -> None:
        self._ring = BufferRing(plan_buckets(manifest), self._device)
        self.line("ring", self._ring.plan, self._ring.handles())

    def _open_network(self, manifest: Manifest) -> None:
        """Nothing to open for one worker alone."""

    def send(self, version: int, across: AcrossRanks | None = None) -> None:
        """Export a round to the worker, together with all ranks of the replica."""
        if self.transport in ACROSS:
            announces, self._is_announced = not self._is_announced, False
            if announces:
                with suppress(TransferError):  # the answer raises it, after the ranks have agreed
                    self._announce()
            write_export(
                self._models,
                partial(self._prepared, self.target),
                self._shared if announces and self.transport == "shards" else self._opened,
                last=None if self._writer is None else self._writer.last,
                across=across,
                more_handles=partial(self.line, "more_handles"),
            )
            problem = "" if across is None else across.problem
            self._messages = f"ranks exchange messages: {problem}" if problem else ""
            self.line("complete", version)
            self._opened().let_go()
            return
        self._send_buckets()
        self.line("finish", version)

    def _send_buckets(self, *, compares: bool = False) -> None:
        assert self._ring is not None
        pairs = iter_hf_weights(self._models, target=self.target, **self._options)
        with closing(self._ring.fill(pairs, acknowledged=self.line.answer)) as buckets:
            for bucket in buckets:
                self.line.send("bucket", (bucket.number, compares))

    def compare(self, manifest: Manifest) -> Compared | None:
        """As ``send``, but the worker compares the round with what it holds; None if its loader takes all weights.

        Args:
            manifest: what an export with ``target`` yields on this rank.
        """
        if self._map is None:
            return super().compare(manifest)
        is_without_slots = self._ring is None
        if is_without_slots:
            try:
                self._open_ring(manifest)
            except TransferError:
                super().send(0)
                raise
        self._send_buckets(compares=True)
        compared: Compared = self.line("compared", is_without_slots)
        if is_without_slots and self._ring is not None:
            self._ring.close()
            self._ring = None
        return compared

    def close(self) -> None:
        """Let go of the worker and of its memory, whatever state it is in."""
        for part in (self._writer, self.line.pipe, self._ring):
            with suppress(Exception):
                if part is not None:
                    part.close()
