"""Seconds of a whole sync, until an engine may sample, by its loader and by its map.

    python benchmarks/engine.py "qwen3-8b" "qwen3-30b-a3b layers=24" --engine vllm --engine-path SITE
    python benchmarks/engine.py --device cpu "tiny" "tiny-moe" --engine stand-in
    torchrun --nproc-per-node 2 benchmarks/engine.py "qwen3-30b-a3b layers=12 tp=2 ep=2 sp=1" --engine vllm ...
    torchrun --nproc-per-node 2 benchmarks/engine.py "qwen3-8b tp=2" --engine vllm --engine-device cuda:2 ...
    python benchmarks/engine.py "qwen3-8b" --quantize none '{"quant_method": "fp8"}' --engine vllm ...

Weights are random. The engine is a separate process, which may have a different ``PYTHONPATH``. It has as many ranks as
the trainer, by tensor parallelism, on the trainer's GPUs or on the GPUs from ``--engine-device`` on. Each trainer rank
serves one rank of the engine. A sync lasts from the call on the trainer until the engine has answered at the end of the
round. It includes all checks, copies and answers; caches are reset, and both devices are synchronised. There is one
warm-up, then the median and the worst of rank 0 are published.

``plain`` is the engine's loader alone. ``whole`` is the loader with the work after it: vLLM's layerwise reload. ``map``
copies out of the ring by the map. ``direct`` writes HF tensors straight into the engine's parameters, and ``shards``
megatron-core's shards, with no HF tensor between. ``sync`` is a ``WeightSync``, which chooses by itself, and once more
with each of ``--transports``. With ``--vllm-backend`` vLLM's own functions send HF tensors at the end, ``nccl`` to
another GPU. Checksums of every parameter are compared after each way.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import config_of, format_of, most, outside_of_the_job, parsed, report, set_up

import mcore_bridge as mb
from mcore_bridge.errors import TransferError

HERE = Path(__file__).parent
_LINK_BYTES = 4 << 30


class Engine:
    """The engine's process. Rank 0 calls its methods by name for all ranks, and each rank gets the answer of its
    engine's rank.
    """

    def __init__(self, arguments: Namespace, config: dict[str, Any]) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(backend="gloo") if self.size > 1 else None
        if not self.rank:
            self._start(arguments, config)
        self.answer()

    def _start(self, arguments: Namespace, config: dict[str, Any]) -> None:
        address = tempfile.mktemp(prefix="engine-")
        path = [str(HERE.parent), str(HERE), *filter(None, [arguments.engine_path])]
        variables = {"PYTHONPATH": os.pathsep.join(path), **({} if arguments.engine_path else _own_path(path))}
        command = [sys.executable, str(HERE / "engines.py"), address, "--engine", arguments.engine]
        command += ["--device", arguments.engine_device or arguments.device, "--config", json.dumps(config)]
        command += ["--ranks", str(self.size), *["--sleeps"] * arguments.sleeps]
        command += ["--expert-parallel"] * arguments.expert_parallel
        command += [f"--vllm-backend={arguments.vllm_backend}"] * bool(arguments.vllm_backend)
        with Listener(address) as listener:
            self.process = subprocess.Popen(command, env=outside_of_the_job(**variables))
            listener._listener._socket.settimeout(300)
            self.pipe = listener.accept()

    def __call__(self, method: str, *arguments: Any) -> Any:
        self.ask(method, *arguments)
        return self.answer()

    def ask(self, method: str, *arguments: Any) -> None:
        """Ask all ranks of the engine, once all ranks of the trainer have called this."""
        by_rank = [arguments] * self.size
        if self.group is not None:
            dist.gather_object(arguments, None if self.rank else by_rank, group=self.group)
        if not self.rank:
            self.pipe.send((method, by_rank))

    def answer(self) -> Any:
        """The next answer of this rank's engine; raises what the engine raised."""
        answers = [None if self.rank else self.pipe.recv()]
        if self.group is not None:
            dist.broadcast_object_list(answers, group=self.group)
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0][self.rank] if isinstance(answers[0], list) else None

    def receive(self, info: Any) -> None:
        """The client that a ``WeightSync`` calls, on rank 0 alone."""
        self.pipe.send(("receive", [(dict(info), rank, self.size) for rank in range(self.size)]))
        if isinstance(answer := self.pipe.recv(), Exception):
            raise answer

    def close(self) -> None:
        """End the process."""
        if self.rank:
            return
        self.pipe.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()


def _own_path(path: list[str]) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])}


def main() -> None:
    """Measure each case, with a new engine."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="+", help="a model: 'qwen3-8b', layers=N for fewer")
    parser.add_argument("--engine", choices=("stand-in", "vllm"), default="stand-in")
    parser.add_argument("--engine-path", help="PYTHONPATH of the engine's process; by default that of this one")
    parser.add_argument("--sleeps", action="store_true", help="vLLM with its sleeping allocator")
    parser.add_argument("--expert-parallel", action="store_true", help="vLLM's experts are dealt to its ranks")
    parser.add_argument("--device", choices=("cpu", "cuda:0"), default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--engine-device", help="the engine's first GPU, such as cuda:2; by default the trainer's first"
    )
    parser.add_argument("--slot-mb", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--only-sync", action="store_true", help="measure WeightSync alone, beside the slow ways once")
    parser.add_argument(
        "--transports", nargs="*", default=[], help="further transports of WeightSync: pull, ring, network"
    )
    parser.add_argument(
        "--vllm-backend", choices=("ipc", "nccl"), help="of vLLM's own transfer of weights, beside the others"
    )
    parser.add_argument(
        "--quantize", nargs="+", type=format_of, default=[None], help='"none", or a quantization_config as JSON'
    )
    parser.add_argument("--slow-repeats", type=int, default=3, help="of the engine's own loader")
    arguments = parser.parse_args()
    for case in arguments.cases:
        for quantize in arguments.quantize:
            measure(case, quantize, arguments)


@torch.no_grad()
def measure(case: str, quantize: dict[str, Any] | None, arguments: Namespace) -> None:
    """One report for each way of a case, with weights in one format."""
    name, layers, sizes = parsed(case)
    on_gpu = arguments.device != "cpu"
    dims = set_up(Namespace(**sizes, device="cuda" if on_gpu else "cpu"))
    config = config_of(name, layers)
    options = {"dims": dims, "dtype": torch.bfloat16, "device": arguments.device.partition(":")[0]}
    models = mb.build_model(config, **options, backend=arguments.backend, load_weights=False)
    in_buffers(models)
    fill(models, 0)
    fields = config.to_dict() | ({"quantization_config": described(models, quantize)} if quantize else {})
    engine = Engine(arguments, fields)
    try:
        with closing(Case(case, models, engine, quantize, arguments)) as running:
            running.run()
    finally:
        engine.close()
        models.clear()
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()


def described(models: list[torch.nn.Module], quantize: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint in this format says of itself: vLLM waits for scales of each module that is not listed."""
    names = {spec.name for spec in mb.manifest(models, quantize=quantize)}
    plain = {name for name in names if name.endswith(".weight") and f"{name}_scale_inv" not in names}
    return quantize | {"modules_to_not_convert": sorted(name.removesuffix(".weight") for name in plain)}


def in_buffers(models: list[torch.nn.Module]) -> None:
    """Move all parameters of a dtype into one allocation, as megatron-core's DDP does for its distributed optimizer."""
    parameters = [parameter for chunk in models for parameter in chunk.parameters()]
    for dtype in {parameter.dtype for parameter in parameters}:
        of_dtype = [parameter for parameter in parameters if parameter.dtype == dtype]
        starts = [0, *accumulate(-(-parameter.numel() // 64) * 64 for parameter in of_dtype)]
        buffer = torch.empty(starts[-1], dtype=dtype, device=of_dtype[0].device)
        for parameter, start in zip(of_dtype, starts, strict=False):
            parameter.data = buffer[start : start + parameter.numel()].view(parameter.shape).copy_(parameter)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def fill(models: list[torch.nn.Module], seed: int) -> None:
    """The weights of a step. Parameters that ranks share are equal, and all shards and experts differ."""
    from megatron.core import parallel_state

    device = next(models[0].parameters()).device
    of_tp, of_ep = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_expert_model_parallel_rank()
    of_etp = parallel_state.get_expert_tensor_parallel_rank()
    shared, cut, expert = (
        torch.Generator(device).manual_seed(3 * (1000 * seed + place) + kind)
        for kind, place in enumerate((0, of_tp, 100 * of_ep + of_etp))
    )
    for chunk in models:
        for parameter in chunk.parameters():
            is_cut = getattr(parameter, "tensor_model_parallel", False)
            generator = cut if is_cut else shared
            parameter.data.normal_(std=0.02, generator=generator if getattr(parameter, "allreduce", True) else expert)


class Case:
    """One model and one engine."""

    def __init__(
        self,
        case: str,
        models: list[torch.nn.Module],
        engine: Engine,
        quantize: dict[str, Any] | None,
        arguments: Namespace,
    ) -> None:
        self.case, self.models, self.engine, self.arguments = case, models, engine, arguments
        self.quantize = quantize
        self.manifest = mb.manifest(models, quantize=quantize)
        self.device = "cpu" if arguments.device == "cpu" else f"cuda:{torch.cuda.current_device()}"
        plan = mb.plan_buckets(self.manifest, slot_bytes=self._slot_bytes())
        self.ring = mb.BufferRing(plan, self.device)
        self.writer: mb.EngineWriter | None = None
        self.report(
            "model",
            gb=round(self.manifest.num_bytes / 1e9, 3),
            hf_tensors=len(self.manifest),
            slots_gb=round(plan.num_slots * plan.slot_bytes / 1e9, 3),
        )

    def close(self) -> None:
        """Free the engine's memory and the ring."""
        if self.writer is not None:
            self.writer.close()
        self.ring.close()

    def _slot_bytes(self) -> int:
        largest = max(spec.num_bytes for spec in self.manifest)
        return max(self.arguments.slot_mb << 20, 3 * largest if self.device == "cpu" else largest)

    def run(self) -> None:
        """Everything, in one run."""
        repeats, slow = self.arguments.repeats, self.arguments.slow_repeats
        engine = self.engine
        engine("connect", self.ring.plan, self.ring.handles())
        self.publish("raw copy of the bytes, engine", engine("raw_copy", repeats))
        if self.arguments.engine_device:
            self.time(f"raw copy to {self.arguments.engine_device}", repeats, self.raw_copy)
        elif self.device != "cpu" and (count := torch.cuda.device_count()) > 1 and engine.size > 1:
            following = f"cuda:{(torch.cuda.current_device() + 1) % count}"
            copy = partial(self.copied_to, following, _LINK_BYTES)
            self.time(f"raw copies of {_LINK_BYTES >> 30} GiB from each rank to the next GPU at once", repeats, copy)
        self.time("export alone", repeats, self.drain)
        self.time("ring, nobody loads", repeats, lambda: self.sync("none"))
        expected = self.time_sync("whole", slow)
        if self.quantize is None:  # else vLLM's loader cannot load twice without the work after it
            plain = self.time_sync("plain", slow)
            self.report("plain and whole alike", alike=plain == expected)
        for transport in (None, *self.arguments.transports):
            self.by_one_object(transport, repeats, expected)
        if self.arguments.vllm_backend:
            sync = vllms_own(self.arguments, self.models, self.engine)
            self.time(f"sync, vLLM's {self.arguments.vllm_backend}", slow, sync)
            self.check(f"vLLM's {self.arguments.vllm_backend}", sync, expected)
        if self.arguments.only_sync:
            return
        free = engine("memory")
        self.report("map", **engine("make_map"))
        self.report("map kept", seconds=engine("prove_kept"), extra_bytes=free - engine("memory"))
        self.compare("ring", self.time_sync("map", repeats), expected)
        try:
            self.sync_direct()
        except (RuntimeError, TransferError) as error:
            self.report("direct", refused=str(error).strip().splitlines()[-1][:300])
            return
        self.time("direct", repeats, self.sync_direct)
        self.check("direct", self.sync_direct, expected)
        self.time("shards", repeats, self.sync_shards)
        self.check("shards", self.sync_shards, expected)

    def by_one_object(self, transport: Any, repeats: int, expected: dict[str, int]) -> None:
        """Rounds of a ``WeightSync``. The first one makes a map, or proves a stored one."""
        with mb.WeightSync(self.models, self.engine.receive, transport=transport, quantize=self.quantize) as sync:
            start = time.perf_counter()
            report = sync()
            first = time.perf_counter() - start
            ways = sorted({f"{worker.transport} {worker.reason[:300]}".strip() for worker in report.workers})
            self.report(f"WeightSync, transport {transport}", ways=ways, first_s=round(first, 2))
            self.time(f"sync, WeightSync {report.workers[0].transport}", repeats, sync)
            self.check(f"WeightSync {report.workers[0].transport}", sync, expected)

    def check(self, way: str, sync: Callable[[], None], expected: dict[str, int]) -> None:
        """Set the engine to NaN, and check that a round gives it the bits of its own loader."""
        self.engine("forget")
        sync()
        self.compare(way, self.engine("digests"), expected)

    def time_sync(self, way: str, repeats: int) -> dict[str, int]:
        """The engine's checksums after syncs of other weights, and then of the first again. The seconds are
        published.
        """
        fill(self.models, 1)
        self.sync(way)
        fill(self.models, 0)
        if way == "map":
            self.engine("forget")
        self.time(f"sync, {way}", repeats, lambda: self.sync(way))
        return self.engine("digests")

    def sync(self, way: str) -> None:
        """A round through the ring."""
        pairs = mb.iter_hf_weights(self.models, quantize=self.quantize)
        for bucket in self.ring.fill(pairs, acknowledged=self.engine.answer):
            self.engine.ask("load", bucket.number, way)
        self.engine("finish", way)

    def sync_direct(self) -> None:
        """A round without one."""
        self.opened().write(mb.iter_hf_weights(self.models, quantize=self.quantize))
        self.engine("complete")

    def sync_shards(self) -> None:
        """A round without HF tensors."""
        mb.export_into(self.models, self.opened(), quantize=self.quantize)
        self.engine("complete")

    def opened(self) -> mb.EngineWriter:
        """The engine's memory, for one round."""
        engine_map, handles = self.engine("share", None if self.writer else list(self.manifest))
        if engine_map is not None:
            self.writer = mb.EngineWriter(engine_map, handles)
        assert self.writer is not None
        return self.writer

    def raw_copy(self) -> None:
        """As many bytes as the weights have, over the link to the engine's GPU, 1 GiB at a time."""
        self.copied_to(self.arguments.engine_device, self.manifest.num_bytes)

    def copied_to(self, device: str, num_bytes: int) -> None:
        """Copy so many bytes to a GPU, 1 GiB at a time. Several ranks begin together."""
        source = torch.ones(1 << 30, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source, device=device)
        if self.engine.group is not None:
            dist.barrier(self.engine.group)
        for first in range(0, num_bytes, source.numel()):
            size = min(source.numel(), num_bytes - first)
            target[:size].copy_(source[:size])
        torch.cuda.synchronize(device)

    def drain(self) -> None:
        """The export. Its tensors are dropped."""
        for _ in mb.iter_hf_weights(self.models, quantize=self.quantize):
            pass

    def compare(self, way: str, found: dict[str, int], expected: dict[str, int]) -> None:
        """Every parameter of every engine rank has the bits that the engine's own loader gives it."""
        wrong = [name for name in expected if found.get(name) != expected[name]]
        self.report(f"bits, {way}", parameters=len(expected), differing=most(len(wrong)), such_as=wrong[:3])

    def time(self, what: str, repeats: int, function: Callable[[], object]) -> None:
        """Publish seconds of a call."""
        seconds = []
        for _ in range(repeats + 1):
            self._synchronize()
            start = time.perf_counter()
            function()
            self._synchronize()
            seconds.append(time.perf_counter() - start)
        self.publish(what, seconds[1:])

    def publish(self, what: str, seconds: list[float]) -> None:
        """Median and worst."""
        self.report(what, median_s=round(statistics.median(seconds), 4), worst_s=round(max(seconds), 4))

    def report(self, what: str, **more: Any) -> None:
        """A line."""
        method = (self.quantize or {}).get("quant_method")
        report(case=self.case, engine=self.arguments.engine, format=method, what=what, **more)

    def _synchronize(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


def vllms_own(arguments: Namespace, models: list[torch.nn.Module], engine: Engine) -> Callable[[], None]:
    """Rounds by a backend of vLLM, with its own functions on both sides, from one trainer rank."""
    sys.path += [arguments.engine_path] * bool(arguments.engine_path)

    def sync() -> None:
        engine("llm", "start_weight_update")
        send()
        engine("llm", "finish_weight_update")
        engine("llm", "reset_prefix_cache")

    def by_ipc() -> None:
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine  # imports Ray

        def told(info: Any) -> None:
            engine("llm", "update_weights", {"update_info": asdict(info)})

        IPCWeightTransferEngine.trainer_send_weights(mb.iter_hf_weights(models), {"send_mode": told, "packed": True})

    send = by_ipc
    if arguments.vllm_backend == "nccl":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        where = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2}
        engine.ask("llm", "init_weight_transfer_engine", {"init_info": where | {"rank_offset": 1}})
        group = NCCLWeightTransferEngine.trainer_init(where)
        engine.answer()
        specs = mb.manifest(models)
        given = {
            "names": [spec.name for spec in specs],
            "dtype_names": [str(spec.dtype).removeprefix("torch.") for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "packed": True,
        }

        def by_nccl() -> None:
            engine.ask("llm", "update_weights", {"update_info": dict(given)})
            NCCLWeightTransferEngine.trainer_send_weights(mb.iter_hf_weights(models), {"group": group, "packed": True})
            engine.answer()

        send = by_nccl
    return sync


if __name__ == "__main__":
    main()
