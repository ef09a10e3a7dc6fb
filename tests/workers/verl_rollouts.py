"""A trainer and a rollout of verl as actors of Ray on CPUs: its own classes, but for vLLM's HTTP server."""

import asyncio
import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import ray
import torch
import verl  # noqa: F401 - imports our module first, as the environment says
from transformers import AutoConfig
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers import engine_workers
from verl.workers.config import CheckpointEngineConfig, RolloutConfig
from verl.workers.rollout import get_rollout_class

from tests.workers.vllm_sync import CONFIG

BACKEND = "mcore_bridge"
NUM_RANKS = 2
EXTENSION = "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"


def rollout_config():
    """Two processes of verl for a rollout, of which one calls its server."""
    engine = CheckpointEngineConfig(backend=BACKEND, custom_backend_module="mcore_bridge.trainers.verl")
    return RolloutConfig(
        name="vllm",
        mode="async",
        tensor_model_parallel_size=NUM_RANKS,
        free_cache_engine=False,
        checkpoint_engine=engine,
    )


class Trainer(Worker):
    """A rank of the trainer, with verl's methods for weights and a small model."""

    update_weights = engine_workers.ActorRolloutRefWorker.update_weights
    execute_checkpoint_engine = engine_workers.ActorRolloutRefWorker.execute_checkpoint_engine

    def __init__(self):
        import mcore_bridge as mb
        from mcore_bridge.trainers.megatron_bridge import AutoBridge

        super().__init__()
        device = SimpleNamespace(empty_cache=int, synchronize=int)
        engine_workers.get_torch_device = lambda: device
        engine_workers.log_gpu_memory_usage = lambda *given, **named: None
        engine_workers.set_expandable_segments = bool
        initialize_global_process_group_ray(backend="cpu:gloo")
        dims = mb.ParallelDims(tp=NUM_RANKS)
        dims.initialize(device="cpu")
        hf = AutoConfig.for_model("qwen3", tie_word_embeddings=False, **CONFIG)
        self.models = mb.build_model(hf, dims=dims, dtype=torch.float32, device="cpu", load_weights=False)
        bridge, rollout = object.__new__(AutoBridge), rollout_config()
        engine = SimpleNamespace(
            get_per_tensor_param=lambda **options: (bridge.export_hf_weights(self.models), None),
            is_param_offload_enabled=False,
        )
        self.actor, self.layered_summon, self.peft_merge = SimpleNamespace(engine=engine), False, False
        self.config = SimpleNamespace(rollout=rollout)
        self.rollout = get_rollout_class("vllm", "async")(rollout, None, None)
        self.checkpoint_engine = CheckpointEngineRegistry.new(BACKEND, is_master=self.rank == 0, bucket_size=1)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def step(self, seed):
        """Change all weights."""
        for parameter in self.models[0].parameters():
            generator = torch.Generator().manual_seed(seed)
            parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def log_probs(self, rows):
        """Of each token but the first, given those before it."""
        import mcore_bridge as mb

        return mb.forward(self.models, torch.tensor(rows)).log_probs[:, -len(rows[0]) + 1 :].tolist()


@ray.remote
class Server:
    """vLLM behind the methods of verl's server, with verl's extension in its worker."""

    def __init__(self, options):
        os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_ENABLE_V1_MULTIPROCESSING="0")
        from vllm import LLM, _custom_ops

        _custom_ops._supports_onednn = False
        folder = Path(tempfile.mkdtemp())
        fields = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **CONFIG}
        (folder / "config.json").write_text(json.dumps(fields))
        self.llm = LLM(
            model=str(folder),
            dtype="float32",
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=128,
            enforce_eager=True,
            kv_cache_memory_bytes=1 << 26,
            worker_extension_cls=EXTENSION,
            **options,
        )
        self.steps = []

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        self.llm.collective_rpc(method, timeout, args, kwargs)

    def clear_kv_cache(self):
        self.llm.reset_prefix_cache()

    def set_global_steps(self, number):
        self.steps.append(number)

    def told(self):
        """The versions that verl has told the server."""
        return self.steps

    def has_map(self):
        """Whether the worker was written by a map."""
        (answer,) = self.llm.collective_rpc(_has_map)
        return answer

    def use_own_steps(self):
        """Have verl's own code load the weights, as it does for quantized models."""
        self.llm.collective_rpc(_use_own_steps)

    def log_probs(self, rows):
        from vllm import SamplingParams

        asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        answers = self.llm.generate([{"prompt_token_ids": row} for row in rows], asked, use_tqdm=False)
        pairs = zip(rows, (answer.prompt_logprobs[1:] for answer in answers), strict=True)
        return [[found[token].logprob for token, found in zip(row[1:], logs, strict=True)] for row, logs in pairs]


def _has_map(worker):
    return bool(worker.worker_of_trainer._engine.map.copies)


def _use_own_steps(wrapper):
    worker = wrapper.worker
    worker.worker_of_trainer.close()
    del worker.worker_of_trainer
    worker.reason_for_own_steps = lambda: "this test wants it"


class Replica(SimpleNamespace):
    """What verl's manager wants of a rollout."""

    async def nothing(self, **options):
        """It has no requests, and keeps its cache."""

    abort_all_requests = release_kv_cache = resume_kv_cache = resume_generation = nothing


def group(cls, prefix, **arguments):
    """Actors of Ray, as verl starts them."""
    pool = RayResourcePool([NUM_RANKS], use_gpu=False, name_prefix=prefix)
    init = RayClassWithInitArgs(cls=ray.remote(cls), **arguments)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=init, name_prefix=prefix, device_name="cpu")


def rounds(options=None):
    """After each round: how far apart log-probs are, what the server was told, and whether it was written by a map."""
    server = Server.options(name="vllm_server_0_0").remote(options or {})
    trainers = group(Trainer, "trainer")
    workers = group(CheckpointEngineWorker, "rollout", rollout_config=rollout_config(), model_config=None)
    manager = CheckpointEngineManager(rollout_config().checkpoint_engine, trainers, [Replica(workers=workers.workers)])
    rows = torch.randint(0, CONFIG["vocab_size"], (3, 20), generator=torch.Generator().manual_seed(1)).tolist()
    apart, maps = [], []
    for number, mode in enumerate([BACKEND, BACKEND, "naive", "naive", "own steps"]):
        trainers.step(number)
        if mode == "own steps":
            ray.get(server.use_own_steps.remote())
        if mode == BACKEND:
            manager.update_weights(global_steps=number)
        else:
            ray.get(trainers.update_weights(global_steps=number, mode="naive"))
        ours = torch.tensor(trainers.log_probs(rows)[0])
        apart.append((ours - torch.tensor(ray.get(server.log_probs.remote(rows)))).abs().max().item())
        maps.append(ray.get(server.has_map.remote()))
    return apart, ray.get(server.told.remote()), maps


def main():
    """One job, whose results are printed as JSON."""
    ray.init(num_cpus=64, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=True)
    print("FOUND", json.dumps(rounds()))


if __name__ == "__main__":
    asyncio.set_event_loop(asyncio.new_event_loop())
    main()
