"""A trainer and a rollout of verl as actors of Ray on CPUs, with its manager, adapter, server and extension of vLLM."""

import importlib
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import ray
import torch
import verl  # noqa: F401 - imports our module first, as the environment says
from tokenizers import Tokenizer, models
from transformers import AutoConfig, PreTrainedTokenizerFast
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers import engine_workers
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

from tests.workers.vllm_sync import CONFIG

BACKEND = "mcore_bridge"
NUM_RANKS = 2


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


class Server(vLLMHttpServer):
    """verl's server of vLLM, whose workers can be asked."""

    async def has_map(self):
        """Whether the workers were written by a map."""
        return all(await self.engine.collective_rpc(_has_map))

    async def use_own_steps(self):
        """Have verl's own code load the weights from now on, as it does for quantized models."""
        await self.engine.collective_rpc(_use_own_steps)


def _has_map(wrapper):
    return bool(wrapper.worker.worker_of_trainer._engine.map.copies)


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


def launched():
    """A server with random weights, and tokens for all of its vocabulary, since verl masks other ones."""
    folder, words = tempfile.mkdtemp(), {str(number): number for number in range(CONFIG["vocab_size"])}
    fields = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False, **CONFIG}
    (Path(folder) / "config.json").write_text(json.dumps(fields))
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="3", eos_token="1").save_pretrained(folder)
    sizes = {"max_model_len": 128, "prompt_length": 64, "response_length": 64}
    sizes |= {"max_num_batched_tokens": 256, "max_num_seqs": 8}
    sizes |= {"tensor_model_parallel_size": NUM_RANKS}
    switches = {"enable_sleep_mode": False, "free_cache_engine": False, "enforce_eager": True}
    given = RolloutConfig(name="vllm", mode="async", dtype="float32", load_format="dummy", **sizes, **switches)
    place = {"replica_rank": 0, "node_rank": 0, "gpus_per_node": 1, "nnodes": 1, "cuda_visible_devices": ""}
    actor = ray.remote(Server).options(name="vllm_server_0_0", max_concurrency=100)
    server = actor.remote(given, HFModelConfig(path=folder), rollout_mode=RolloutMode.STANDALONE, workers=[], **place)
    ray.get(server.launch_server.remote())
    return server


def log_probs(server, rows):
    """What vLLM says of each token but the first, and the version that it says of itself."""
    asked = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}
    answers = ray.get([server.generate.remote(row, dict(asked), uuid4().hex) for row in rows])
    logs = [[of_token[0] for of_token in answer.extra_fields["prompt_logprobs"][:-1]] for answer in answers]
    return torch.tensor(logs), answers[0].extra_fields["global_steps"]


def rounds():
    """After each round: how far apart log-probs are, vLLM's version, and whether it was written by a map."""
    server, trainers = launched(), group(Trainer, "trainer")
    workers = group(CheckpointEngineWorker, "rollout", rollout_config=rollout_config(), model_config=None)
    manager = CheckpointEngineManager(rollout_config().checkpoint_engine, trainers, [Replica(workers=workers.workers)])
    rows = torch.randint(0, CONFIG["vocab_size"], (3, 20), generator=torch.Generator().manual_seed(1)).tolist()
    found = []
    for number, mode in enumerate([BACKEND, BACKEND, "naive", "naive", "own steps"]):
        trainers.step(number)
        if mode == "own steps":
            ray.get(server.use_own_steps.remote())
        if mode == BACKEND:
            manager.update_weights(global_steps=number)
        else:
            ray.get(trainers.update_weights(global_steps=number, mode="naive"))
        theirs, version = log_probs(server, rows)
        apart = (torch.tensor(trainers.log_probs(rows)[0]) - theirs).abs().max().item()
        found.append((apart, version, ray.get(server.has_map.remote())))
    return found


def main():
    """One job, whose results are printed as JSON."""
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions of this file go to the worker
    options = {"num_cpus": 64, "include_dashboard": False, "object_store_memory": 200 << 20}
    ray.init(**options, runtime_env={"env_vars": environment})
    print("FOUND", json.dumps(rounds()))


if __name__ == "__main__":
    # Ray finds the classes of a module by its name, which is not that of a script
    importlib.import_module("tests.workers.verl_rollouts").main()
