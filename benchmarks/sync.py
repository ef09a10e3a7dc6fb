"""Times a ``WeightSync`` into several engines at once. Each engine is a process with its own ranks.

    torchrun --nproc-per-node 4 benchmarks/sync.py "qwen3-30b-a3b layers=24 tp=4 ep=4 sp=1" --engine vllm \
        --engine-path SITE --engine-devices cuda:0 cuda:2 --engine-tp 2
    torchrun --nproc-per-node 2 benchmarks/sync.py "tiny-moe tp=2 ep=2 sp=1" --device cpu --engine-devices cpu cpu

Weights are random. The engines are those of ``engines.py``; each has ``--engine-tp`` ranks on the devices from its own
device on. First all engines take the weights by their loaders. Then the parameters are set to NaN, and a round by the
chosen ways must give all of them equal checksums. There is one warm-up, then the median and the worst of rank 0 are
published.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import config_of, most, outside_of_the_job, parsed, report, set_up
from engine import fill, in_buffers

import mcore_bridge as mb

HERE = Path(__file__).parent


class Engine:
    """The client of one engine, on rank 0."""

    def __init__(self, arguments: Namespace, config: dict[str, Any], device: str) -> None:
        self.ranks, self.device = arguments.engine_tp, device
        address = tempfile.mktemp(prefix="engine-")
        path = [str(HERE.parent), str(HERE), *filter(None, [arguments.engine_path, os.environ.get("PYTHONPATH")])]
        command = [sys.executable, str(HERE / "engines.py"), address, "--engine", arguments.engine]
        command += ["--device", device, "--config", json.dumps(config), "--ranks", str(self.ranks)]
        self._listener = Listener(address)
        variables = {"PYTHONPATH": os.pathsep.join(path[: 3 if arguments.engine_path else 4])}
        self.process = subprocess.Popen(command, env=outside_of_the_job(**variables))

    def wait(self) -> None:
        """Until it has started."""
        self.pipe: Connection = self._listener.accept()
        self._listener.close()
        self._answer()

    def ask(self, method: str, *arguments: Any) -> Any:
        """The answers of all ranks."""
        self.pipe.send((method, [arguments] * self.ranks))
        return self._answer()

    def receive(self, info: Any) -> None:
        """What a ``WeightSync`` calls."""
        self.pipe.send(("receive", [(dict(info), rank, self.ranks) for rank in range(self.ranks)]))
        self._answer()

    def _answer(self) -> Any:
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the process."""
        self.pipe.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()


@torch.no_grad()
def main() -> None:
    """One model, all engines."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("case", help="a model and the trainer's mesh: 'qwen3-8b tp=2', layers=N for fewer")
    parser.add_argument("--engine", choices=("stand-in", "vllm"), default="stand-in")
    parser.add_argument("--engine-path", help="PYTHONPATH of the engines' processes; by default that of this one")
    parser.add_argument("--engine-devices", nargs="+", required=True, help="the first device of each engine")
    parser.add_argument("--engine-tp", type=int, default=1, help="ranks of each engine")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument(
        "--transports", nargs="*", default=[], help="further transports of WeightSync: pull, ring, network"
    )
    arguments = parser.parse_args()
    name, layers, sizes = parsed(arguments.case)
    dims, config = set_up(Namespace(**sizes, device=arguments.device)), config_of(name, layers)
    options = {"dims": dims, "dtype": torch.bfloat16, "device": arguments.device, "backend": arguments.backend}
    models = mb.build_model(config, **options, load_weights=False)
    in_buffers(models)
    is_lead = dist.get_rank() == 0
    engines = [Engine(arguments, config.to_dict(), device) for device in arguments.engine_devices if is_lead]
    manifest = mb.manifest(models)
    ring = mb.BufferRing(mb.plan_buckets(manifest), "cpu")  # a stand-in makes its parameters by its plan
    for engine in engines:
        engine.wait()
        if arguments.engine == "stand-in":
            engine.ask("connect", ring.plan, ring.handles())
    ring.close()
    receives = [engine.receive for engine in engines]

    def publish(what: str, **more: Any) -> None:
        report(case=arguments.case, engines=arguments.engine_devices, what=what, **more)

    if is_lead:
        seconds = engines[0].ask("raw_copy", 5)
        publish("raw copy of the bytes, an engine's rank", median_s=round(statistics.median(seconds[0]), 4))
    fill(models, 0)
    with mb.WeightSync(models, receives, loads=True) as sync:
        start = time.perf_counter()
        sync()
        publish("by the engines' loaders", seconds=round(time.perf_counter() - start, 3))
    expected = [engine.ask("digests") for engine in engines]
    for transport in (None, *arguments.transports):
        with mb.WeightSync(models, receives, transport=transport) as sync:
            start = time.perf_counter()
            first = sync()
            publish("first call", seconds=round(time.perf_counter() - start, 2), gb=round(manifest.num_bytes / 1e9, 3))
            ways = [[w.engine, w.rank, w.trainer, w.transport, w.sibling, w.reason[:120]] for w in first.workers]
            publish("ways", ways=ways)
            seconds = []
            for _ in range(arguments.repeats + 1):
                dist.barrier()
                start = time.perf_counter()
                sync()
                seconds.append(time.perf_counter() - start)
            way = f"sync, {first.workers[0].transport}"
            publish(way, median_s=round(statistics.median(seconds[1:]), 4), worst_s=round(max(seconds[1:]), 4))
            for engine in engines:
                engine.ask("forget")
            sync()
        found = [engine.ask("digests") for engine in engines]
        pairs = [pair for one, other in zip(expected, found, strict=True) for pair in zip(one, other, strict=True)]
        wrong = [key for one, other in pairs for key in one if one[key] != other.get(key)]
        publish("bits", parameters=sum(len(one) for one, _ in pairs), differing=most(len(wrong)), such_as=wrong[:3])
    for engine in engines:
        engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
