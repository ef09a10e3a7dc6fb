"""Seconds of verl's own ``update_weights`` into vLLM on the trainer's GPU, with our sync and with verl's sender.

    python benchmarks/verl_rollout.py "qwen3-8b" "qwen3-30b-a3b layers=24"
    python benchmarks/verl_rollout.py --device cpu "tiny"

It needs verl 0.9.1, Ray and vLLM in one environment: ``docs/trainers/verl.md`` says how. Ray starts a trainer of one
rank and verl's server of vLLM, with sleep mode, as verl starts them. The method that is timed is
``ActorRolloutRefWorker.update_weights``, called through Ray. Both ways export by our bridge. They differ in one key,
``checkpoint_engine.engine_kwargs.mcore_bridge.colocated``. With ``False`` verl's sender puts HF tensors into buckets,
which vLLM's loader takes.

``awake`` is a round into an engine that keeps its memory (``free_cache_engine=False``). ``asleep`` is a round into an
engine that sleeps, as in verl's default: verl also maps the memory of weights and of the cache again, which is timed
alone as ``resume``. Checksums of every parameter are compared, from NaN on.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
import tempfile
import time
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
import verl  # noqa: F401 - imports our module first, as the environment says
from common import config_of, parsed, report
from engine import fill, in_buffers
from engines import raw_copies
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers import engine_workers
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

ENVIRONMENT = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions of this file go to vLLM's worker
}
ON_CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}


def rollout_config(ours: bool, sleeps: bool) -> Any:
    """verl's settings of a rollout."""
    engine = CheckpointEngineConfig(backend="naive", engine_kwargs={"mcore_bridge": {"colocated": ours}})
    return RolloutConfig(
        name="vllm",
        mode="async",
        tensor_model_parallel_size=1,
        free_cache_engine=sleeps,
        checkpoint_engine=engine,
    )


class Trainer(Worker):
    """A rank of the trainer, with verl's method for weights."""

    update_weights = engine_workers.ActorRolloutRefWorker.update_weights

    def __init__(self, case: str, device: str) -> None:
        import mcore_bridge as mb
        from mcore_bridge.trainers.megatron_bridge import AutoBridge

        super().__init__()
        if device == "cpu":
            engine_workers.get_torch_device = lambda: SimpleNamespace(empty_cache=int, synchronize=int)
            engine_workers.log_gpu_memory_usage = lambda *given, **named: None
            engine_workers.set_expandable_segments = bool
        dims = mb.ParallelDims()
        dims.initialize(device=device)
        name, layers, _ = parsed(case)
        models = mb.build_model(
            config_of(name, layers), dims=dims, dtype=torch.bfloat16, device=device, load_weights=False
        )
        in_buffers(models)
        self.models, bridge = models, object.__new__(AutoBridge)
        engine = SimpleNamespace(
            get_per_tensor_param=lambda **options: (bridge.export_hf_weights(models), None),
            is_param_offload_enabled=False,
        )
        self.actor, self.layered_summon, self.peft_merge = SimpleNamespace(engine=engine), False, False
        self.rollouts = {
            ours: get_rollout_class("vllm", "async")(rollout_config(ours, True), None, None) for ours in (0, 1)
        }
        self.num_bytes = mb.manifest(models).num_bytes

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def use(self, ours: bool, sleeps: bool) -> int:
        """Take these settings for the next rounds; returns the bytes of a round."""
        self.config = SimpleNamespace(rollout=rollout_config(ours, sleeps))
        self.rollout = self.rollouts[ours]
        self.rollout.config = self.config.rollout
        return self.num_bytes

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def resume(self) -> float:
        """Seconds until verl has mapped the memory of a sleeping engine again, without new weights."""
        start = time.perf_counter()
        for tag in ("weights", "kv_cache"):
            await self.rollout.resume(tags=[tag])
        return time.perf_counter() - start

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def step(self, seed: int) -> None:
        """Change all weights."""
        fill(self.models, seed)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def describe(self, **fields: Any) -> None:
        """Print a line of the report."""
        report(**fields)


class Server(vLLMHttpServer):
    """verl's server of vLLM, whose worker can be asked."""

    async def ask(self, function: Any) -> Any:
        """What a function says of the worker."""
        return (await self.engine.collective_rpc(function))[0]


def digests(wrapper: Any) -> dict[str, int]:
    """Checksums of all parameters."""
    from mcore_bridge.weights.engine.prove import checksums

    return checksums(dict(wrapper.worker.model_runner.model.named_parameters()))


def forget(wrapper: Any) -> None:
    """Overwrite all weights, so that old values show."""
    with torch.no_grad():
        for parameter in wrapper.worker.model_runner.model.parameters():
            parameter.fill_(torch.nan)


def raw_copy(wrapper: Any) -> list[float]:
    """Seconds to copy the bytes of all parameters once within the worker's memory."""
    return raw_copies(wrapper.worker.model_runner.model, wrapper.worker.device, 5)


def launched(case: str, device: str) -> Any:
    """verl's server, with random weights."""
    name, layers, _ = parsed(case)
    config, folder = config_of(name, layers), tempfile.mkdtemp()
    fields = {"architectures": ["Qwen3ForCausalLM"], **config.to_dict(), "dtype": "bfloat16"}
    (Path(folder) / "config.json").write_text(json.dumps(fields))
    words = {str(number): number for number in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="3", eos_token="1").save_pretrained(folder)
    sizes = {"max_model_len": 128, "prompt_length": 64, "response_length": 64, "max_num_batched_tokens": 256}
    sizes |= {"max_num_seqs": 8, "tensor_model_parallel_size": 1, "gpu_memory_utilization": 0.45}
    on_gpu = device != "cpu"
    switches = {"enable_sleep_mode": on_gpu, "free_cache_engine": on_gpu, "enforce_eager": True}
    given = RolloutConfig(name="vllm", mode="async", dtype="bfloat16", load_format="dummy", **sizes, **switches)
    place = {"replica_rank": 0, "node_rank": 0, "gpus_per_node": 1, "nnodes": 1}
    place["cuda_visible_devices"] = "0" if on_gpu else ""
    actor = ray.remote(Server).options(
        name="vllm_server_0_0",
        max_concurrency=100,
        runtime_env={"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}},  # as verl starts it
    )
    mode = RolloutMode.HYBRID if on_gpu else RolloutMode.STANDALONE
    server = actor.remote(given, HFModelConfig(path=folder), rollout_mode=mode, workers=[], **place)
    ray.get(server.launch_server.remote())
    return server


def measure(case: str, device: str, repeats: int) -> None:
    """Both ways, awake and asleep, in turns of one server."""
    server = launched(case, device)
    pool = RayResourcePool([1], use_gpu=device != "cpu", name_prefix=f"trainer{id(server)}")
    init = RayClassWithInitArgs(cls=ray.remote(Trainer), case=case, device=device)
    trainer = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=init, name_prefix="trainer", device_name=device)
    copies = ray.get(server.ask.remote(raw_copy))
    trainer.describe(case=case, what="raw copy of the bytes", median_s=round(statistics.median(copies), 4))
    expected = None
    for sleeps in (False, True) if device != "cpu" else (False,):
        for ours in (False, True) if device != "cpu" else (True,):  # verl's sender needs a GPU
            (num_bytes,) = trainer.use(ours, sleeps)
            seconds = []
            for number in range(repeats + 1):
                trainer.step(number - repeats)  # the last weights are those of seed 0 in each way
                ray.get(server.ask.remote(forget))
                if sleeps:
                    ray.get(server.sleep.remote())
                start = time.perf_counter()
                ray.get(trainer.update_weights(global_steps=number, mode="naive"))
                seconds.append(time.perf_counter() - start)
            found = ray.get(server.ask.remote(digests))
            expected = expected or found
            trainer.describe(
                case=case,
                what="update_weights",
                way="mcore_bridge" if ours else "verl's sender",
                engine="asleep" if sleeps else "awake",
                gb=round(num_bytes / 1e9, 3),
                first_s=round(seconds[0], 3),
                median_s=round(statistics.median(seconds[1:]), 4),
                worst_s=round(max(seconds[1:]), 4),
                parameters=len(found),
                differing=sum(found[name] != value for name, value in expected.items()),
            )
    if device != "cpu":
        seconds = []
        for _ in range(repeats):
            ray.get(server.sleep.remote())
            seconds += trainer.resume()
        trainer.describe(case=case, what="resume", median_s=round(statistics.median(seconds), 4))
    ray.kill(server)
    for actor in trainer.workers:
        ray.kill(actor)


def main() -> None:
    """Each case, with a new trainer and a new server."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="+", help="a model: 'qwen3-8b', layers=N for fewer")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    variables = ENVIRONMENT | (ON_CPU if arguments.device == "cpu" else {})
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    options = {"num_cpus": 64, "include_dashboard": False, "object_store_memory": 200 << 20}
    ray.init(**options, runtime_env={"env_vars": variables})
    for case in arguments.cases:
        measure(case, arguments.device, arguments.repeats)


if __name__ == "__main__":
    # Ray finds the classes of a module by its name, which is not that of a script
    importlib.import_module("verl_rollout").main()
