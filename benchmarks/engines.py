"""The engine's process of ``engine.py``: vLLM, or a stand-in of ours that needs torch alone.

It is started with an address. Through it come calls of methods by name, with arguments for each rank of the engine, and
the answers go back as lists. A call is timed in this process.
"""

from __future__ import annotations

import json
import re
import sys
import time
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mcore_bridge as mb
from mcore_bridge.engines import EngineWorker
from mcore_bridge.engines.vllm import name_loaders
from mcore_bridge.weights.engine.prove import checksums

Pairs = Iterable[tuple[str, Tensor]]
EXAMPLES = Path(__file__).parent.parent / "examples"


class Worker:
    """The methods that every engine has. ``model``, ``device`` and two loaders depend on the engine."""

    model: nn.Module
    device: torch.device

    def plain(self, pairs: Pairs) -> None:
        """Run the loader without the engine's work after it."""
        raise NotImplementedError

    def whole(self, pairs: Pairs) -> None:
        """The loader with it."""
        raise NotImplementedError

    def connect(self, plan: Any, handles: Sequence[Any]) -> None:
        """Open the trainer's slots."""
        self.receiver = mb.Receiver(plan, handles)

    def make_map(self, kept: Any = None) -> dict[str, Any]:
        """Make the map, or prove a stored one; returns the seconds."""
        self.synchronize()
        start = time.perf_counter()
        self.engine = mb.map_engine(self.receiver.plan, self.model, self.whole, kept=kept)
        self.synchronize()
        seconds, found = time.perf_counter() - start, self.engine.map
        return {
            "seconds": round(seconds, 3),
            "copies": len(found.copies),
            "fills": len(found.fills),
            "uncovered": [[entry.tensor, entry.reason] for entry in found.uncovered],
            "tensors": len(found.tensors),
            "elements": found.num_elements,
        }

    def prove_kept(self) -> float:
        """The seconds of a proof of the existing map."""
        return self.make_map(self.engine.map)["seconds"]

    @torch.no_grad()
    def forget(self) -> None:
        """Overwrite all weights, so that old values show."""
        for parameter in self.model.parameters():
            parameter.fill_(torch.nan)
        self.synchronize()

    def load(self, number: int, way: str) -> None:
        """Take a bucket."""
        if way == "map":
            self.receiver.copy_into(number, self.engine)
            return
        with self.receiver.open(number) as pairs:
            if way == "plain":
                self.plain(pairs)
            elif way == "whole":
                self.collect([(name, tensor.to(self.device, copy=True)) for name, tensor in pairs], number)

    def collect(self, pairs: Sequence[tuple[str, Tensor]], number: int) -> None:
        """A part of a whole load."""
        raise NotImplementedError

    def finish(self, way: str) -> None:
        """All buckets have come."""
        self.receiver.finish()
        if way == "whole":
            self.end_of_whole()
        self.synchronize()

    def end_of_whole(self) -> None:
        """The engine's work after loading."""

    def share(self, specs: Any) -> Any:
        """The map, and handles of the engine's memory; nothing if the sender has them."""
        handles = self.engine.share(specs)
        return (None, None) if handles is None else (self.engine.map, handles)

    def complete(self) -> None:
        """A direct round has ended."""
        self.engine.complete()
        self.synchronize()

    def receive(self, info: dict[str, Any], rank: int, size: int) -> None:
        """Take part in a round of a ``WeightSync``."""
        if not hasattr(self, "_worker"):
            name = f"benchmark, worker {rank} of {size}"
            self._worker = EngineWorker(self.model, self.whole, name=name, rank=rank, size=size)
        self._worker.receive(info)

    def digests(self) -> dict[str, int]:
        """Of every parameter."""
        return checksums(dict(self.model.named_parameters()))

    def raw_copy(self, repeats: int) -> list[float]:
        """See ``raw_copies``."""
        return raw_copies(self.model, self.device, repeats)

    def memory(self) -> int:
        """The free bytes of the GPU."""
        if self.device.type != "cuda":
            return 0
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def synchronize(self) -> None:
        """Wait for the device."""
        _synchronize(self.device)


def raw_copies(model: nn.Module, device: torch.device, repeats: int) -> list[float]:
    """Seconds to copy the bytes of all parameters once, from and to memory of a device, 1 GiB at a time."""
    total = sum(tensor.nbytes for tensor in model.parameters())
    source = torch.ones(min(1 << 30, total), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(repeats + 1):
        _synchronize(device)
        start = time.perf_counter()
        for first in range(0, total, source.numel()):
            size = min(source.numel(), total - first)
            target[:size].copy_(source[:size])
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_PARTS = re.compile(r"(?:(q|k|v)|(gate|up)|(down))_proj$")


class StandIn(Worker):
    """Fused projections and stacked experts, made from the names and shapes of a plan."""

    def __init__(self, device: str) -> None:
        self.device, self.model = torch.device(device), nn.Module()
        self.places: dict[str, tuple[nn.Parameter, int | None, int]] = {}

    def connect(self, plan: Any, handles: Sequence[Any]) -> None:
        super().connect(plan, handles)
        rows: dict[tuple[str, int | None], int] = {}
        places, shapes = {}, {}
        for piece in (piece for bucket in plan.buckets for piece in bucket.pieces):
            target, expert = self._target(piece.name)
            start = rows.get((target, expert), 0)
            rows[target, expert] = start + piece.shape[0]
            places[piece.name] = (target, expert, start)
            stack = [] if expert is None else [1 + max(expert, shapes.get(target, [0])[0] - 1)]
            shapes[target] = [*stack, rows[target, expert], *piece.shape[1:]]
        for target, shape in shapes.items():
            memory = torch.zeros(*shape, dtype=torch.bfloat16, device=self.device)
            self.model.register_parameter(target.replace(".", "_"), nn.Parameter(memory, requires_grad=False))
        held = dict(self.model.named_parameters())
        self.places = {name: (held[target.replace(".", "_")], *rest) for name, (target, *rest) in places.items()}

    @staticmethod
    def _target(name: str) -> tuple[str, int | None]:
        """The parameter that a tensor is a part of, and its expert."""
        module = name.removesuffix(".weight")
        expert = re.search(r"\.experts\.(\d+)\.", module)
        part = _PARTS.search(module)
        fused = _PARTS.sub("qkv" if part[1] else "gate_up" if part[2] else "down", module) if part else module
        return re.sub(r"\.experts\.\d+\.", ".experts.", fused), int(expert[1]) if expert else None

    @torch.no_grad()
    def whole(self, pairs: Pairs) -> None:
        for name, tensor in pairs:
            parameter, expert, start = self.places[name]
            memory = parameter.data if expert is None else parameter.data[expert]
            memory[start : start + len(tensor)].copy_(tensor)

    plain = whole

    def collect(self, pairs: Sequence[tuple[str, Tensor]], number: int) -> None:
        self.whole(pairs)


class VllmExtension:
    """``worker_extension_cls``: adds this method to vLLM's worker."""

    rank: int

    def bench(self, method: str, arguments_by_rank: Sequence[Sequence[Any]]) -> Any:
        """Forward a call to our worker."""
        if not hasattr(self, "_benched"):
            self._benched = VllmWorker(self)
        return getattr(self._benched, method)(*arguments_by_rank[self.rank])


class VllmWorker(Worker):
    """vLLM's worker, with the methods of ``Worker``."""

    def __init__(self, worker: Any) -> None:
        self.model, self.device, self._config = worker.model_runner.model, worker.device, worker.model_config
        name_loaders(self.model)

    def plain(self, pairs: Pairs) -> None:
        self.model.load_weights(pairs)

    def whole(self, pairs: Pairs) -> None:
        self.collect(pairs, 0)
        self.end_of_whole()

    def collect(self, pairs: Pairs, number: int) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        with torch.device(self.device):
            if number == 0:
                initialize_layerwise_reload(self.model)
            self.model.load_weights(pairs)

    def end_of_whole(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with torch.device(self.device):
            finalize_layerwise_reload(self.model, self._config)


Ask = Callable[[str, Sequence[Sequence[Any]]], list[Any]]
"""Calls all ranks of an engine."""


def vllm_engine(config: dict[str, Any], arguments: Namespace) -> Ask:
    """vLLM, whose caches of older weights are reset at the end of a round."""
    sys.path[:0] = [str(EXAMPLES)]
    from vllm_engine import VllmEngine

    options = {"worker_extension_cls": "engines.VllmExtension", "enable_sleep_mode": arguments.sleeps}
    options |= {"tensor_parallel_size": arguments.ranks, "enable_expert_parallel": arguments.expert_parallel}
    fields = {"architectures": ["Qwen3ForCausalLM"], **config, "dtype": "bfloat16"}
    own = {"backend": arguments.vllm_backend} if arguments.vllm_backend else None
    engine = VllmEngine(fields, torch.bfloat16, arguments.device, weight_transfer_config=own, **options)
    engine.wake()

    def ask(method: str, arguments_by_rank: Sequence[Sequence[Any]]) -> list[Any]:
        if method == "llm":
            name, *rest = arguments_by_rank[0]
            getattr(engine.llm, name)(*rest)
            return [None for _ in arguments_by_rank]
        answers = engine.llm.collective_rpc("bench", args=(method, arguments_by_rank))
        if method in ("finish", "complete"):
            engine.llm.reset_prefix_cache()
        return answers

    return ask


def stand_in(arguments: Namespace) -> Ask:
    """A stand-in for each rank, each with the whole model."""
    workers = [StandIn(arguments.device) for _ in range(arguments.ranks)]

    def ask(method: str, arguments_by_rank: Sequence[Sequence[Any]]) -> list[Any]:
        with ThreadPoolExecutor(len(workers)) as threads:  # a trainer waits for all of them in one round
            return list(threads.map(lambda worker, rest: getattr(worker, method)(*rest), workers, arguments_by_rank))

    return ask


def main() -> None:
    """Answer until the trainer is gone."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--engine", choices=("stand-in", "vllm"), required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--config", type=json.loads, required=True)
    parser.add_argument("--sleeps", action="store_true")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--expert-parallel", action="store_true")
    parser.add_argument("--vllm-backend")
    arguments = parser.parse_args()
    with Client(arguments.address) as pipe:
        try:
            ask = vllm_engine(arguments.config, arguments) if arguments.engine == "vllm" else stand_in(arguments)
            pipe.send("ready")
        except BaseException:
            pipe.send(RuntimeError(traceback.format_exc()))
            raise
        while True:
            try:
                method, rest = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send(ask(method, rest))
            except Exception:
                pipe.send(RuntimeError(traceback.format_exc()))


if __name__ == "__main__":
    main()
