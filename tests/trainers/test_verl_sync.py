"""verl's weights go into vLLM by a ``WeightSync``, on other GPUs and on the same ones.

Most tests have files with verl's interface in verl's place. The last one has verl, Ray and vLLM, where they are
installed: docs/trainers/verl.md says how.
"""

import asyncio
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import mcore_bridge as mb
from mcore_bridge.engines import EngineWorker
from mcore_bridge.errors import BridgeError, TransferError
from tests.support import pool, verl_site
from tests.support.stand_in import HF_FIELDS, StandIn, held_bits, loaded
from tests.support.strategies import random_state, tiny

ROOT = Path(__file__).parent.parent.parent


class Server:
    """A rollout's server: one worker, and what verl tells it."""

    def __init__(self, name):
        self.model, self.told, self.problem = StandIn(), [], None
        worker = EngineWorker(self.model, self.model.load, name=name)

        async def call(method, info):
            assert method == "receive_from_trainer"
            if self.problem:
                raise self.problem
            await asyncio.to_thread(worker.receive, info)

        self.call = call
        self.clear_kv_cache = SimpleNamespace(remote=lambda: self._note("cleared"))
        self.set_global_steps = SimpleNamespace(remote=self._note)

    async def _note(self, value):
        self.told.append(value)


def message(action):
    """The message of the error that an action raises."""
    with pytest.raises(BridgeError) as caught:
        action()
    return str(caught.value)


class Job:
    """A rank of the trainer, and a process of a rollout in a thread. On rank 1 there is another, without a server."""

    def __init__(self):
        from verl.checkpoint_engine import CheckpointEngineRegistry
        from verl.workers.rollout.vllm_rollout import ServerAdapter

        from mcore_bridge.trainers.megatron_bridge import AutoBridge

        dims = mb.ParallelDims(tp=2)
        dims.initialize(device="cpu")
        self.hf, self.rank = tiny("qwen3_moe", **HF_FIELDS), dist.get_rank()
        self.models = mb.build_model(self.hf, dims=dims, dtype=torch.bfloat16, device="cpu", load_weights=False)
        self.server, self.bridge = Server(f"rollout {self.rank}"), AutoBridge("unused")
        options = {"bucket_size": 1, "timeout": 20.0}
        self.ours = CheckpointEngineRegistry.new("mcore_bridge", is_master=self.rank == 0, **options)
        servers = [self.server, None][: self.rank + 1]
        self.rollouts = [(CheckpointEngineRegistry.new("mcore_bridge", **options), ServerAdapter(s)) for s in servers]

    def step(self, seed):
        self.state = random_state(self.hf, seed=seed, dtype=torch.bfloat16)
        mb.load_hf_weights(self.models, self.state)

    def has_weights(self):
        return held_bits(self.server.model.held()) == held_bits(loaded(self.state, 1, 0))

    def apart(self, number, rollouts, **options):
        """A round of verl's manager; what went wrong on this rank and in its rollouts."""
        metadata = [None] * 2
        dist.all_gather_object(metadata, (self.ours.prepare(), [engine.prepare() for engine, _ in rollouts]))
        flat = [ours for ours, _ in metadata] + [each for _, theirs in metadata for each in theirs]
        own, others = self.ours.build_topology(2, len(flat) - 2, flat)
        self.ours.init_process_group(**{name: values[self.rank] for name, values in own.items()})
        with ThreadPoolExecutor() as threads:
            ends = []
            for engine, adapter in rollouts:
                engine.init_process_group(**{name: values[0] for name, values in others.items()})
                update = adapter.update_weights(engine.receive_weights(number), global_steps=number, wire_format="any")
                ends.append(threads.submit(asyncio.run, update))
            export = self.bridge.export_hf_weights(self.models, **options)
            problems = [_problem(lambda: asyncio.run(self.ours.send_weights(export, global_steps=number)))]
            problems += [_problem(end.result) for end in ends]
        self.ours.finalize()
        return problems, own["num_callers"][0]


def _problem(action):
    try:
        action()
    except (BridgeError, RuntimeError) as error:
        return str(error)
    return ""


def other_gpus(site):
    """Runs in a worker: rounds in which rollouts join, fail and leave."""
    with verl_site.on_path(site):
        job, counts = Job(), []
        for number in range(2):
            job.step(number)
            problems, count = job.apart(number, job.rollouts)
            assert not any(problems), problems
            counts.append(count)
            assert job.has_weights()
        assert job.server.told == ["cleared", 0, "cleared", 1]
        job.server.problem = RuntimeError("it sleeps") if job.rank == 1 else None
        problems, _ = job.apart(2, job.rollouts)
        assert "it sleeps" in problems[0], problems
        assert ("it sleeps" in problems[1]) == (job.rank == 1), problems  # the other rollout has its weights
        job.step(3)
        problems, count = job.apart(3, job.rollouts if job.rank == 0 else [])
        assert not any(problems), problems
        assert job.has_weights() == (job.rank == 0)
        return [*counts, count]


def test_rollouts_on_other_gpus_come_fail_and_go(tmp_path):
    """Three processes meet the trainer at first, and then the two that have a server."""
    assert pool.run(2, other_gpus, verl_site.write(tmp_path)) == [[3, 2, 1]] * 2


def same_gpus(site):
    """Runs in a worker: rounds into rollouts beside the trainer's ranks, and what verl's own class sends."""
    with verl_site.on_path(site):
        job = Job()
        _, adapter = job.rollouts[0]
        for number in range(2):
            job.step(number)
            export = job.bridge.export_hf_weights(job.models)
            asyncio.run(adapter.update_weights(export, peft_config=None, base_sync_done=True, global_steps=number))
            assert job.has_weights()
        assert job.server.told == ["cleared", 0, "cleared", 1]
        peft = {"peft_config": {"r": 8}, "base_sync_done": False}
        asyncio.run(adapter.update_weights(job.bridge.export_hf_weights(job.models), global_steps=2, **peft))
        pairs, number, options = adapter.sent
        assert (len(pairs), number, options) == (len(job.state), 2, peft)
        asyncio.run(adapter.update_weights([("other", torch.ones(1))]))
        assert adapter.sent[0][0][0] == "other"
        adapter.engine_kwargs["mcore_bridge"] = {"colocated": False}
        asyncio.run(adapter.update_weights(job.bridge.export_hf_weights(job.models), global_steps=3))
        assert adapter.sent[1] == 3


def test_rollouts_on_the_same_gpus_need_no_setting(tmp_path):
    pool.run(2, same_gpus, verl_site.write(tmp_path))


def late(site):
    """Runs in a worker: the messages when no rollout comes, and for what the backend does not send."""
    with verl_site.on_path(site):
        from verl.checkpoint_engine import CheckpointEngineRegistry

        job = Job()
        ours = CheckpointEngineRegistry.new("mcore_bridge", is_master=job.rank == 0, bucket_size=1, timeout=0.1)
        address = [ours.prepare().get("address")]
        dist.broadcast_object_list(address)
        ours.init_process_group(address[0], num_callers=1)
        export = job.bridge.export_hf_weights(job.models)
        late = message(lambda: asyncio.run(ours.send_weights(export)))
        mb.add_adapters(job.models, rank=2, alpha=2, targets=["q_proj"])
        base = job.bridge.export_hf_weights(job.models, merge_adapter_weights=False)
        return [
            late,
            message(lambda: asyncio.run(ours.send_weights(base))),
            message(lambda: asyncio.run(ours.send_weights(iter(())))),
            message(lambda: list(ours.receive_weights())),
        ]


def test_what_cannot_be_sent_is_said_on_every_rank(tmp_path):
    for missing, base, foreign, tensors in pool.run(2, late, verl_site.write(tmp_path)):
        assert "expected 1 processes of rollouts" in missing
        assert "set lora.merge=True" in base
        assert "QAT" in foreign
        assert "set rollout.name=vllm" in tensors


def test_weights_that_verl_itself_changes_go_by_its_own_steps(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_DP_RANK", "0")
    parts = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "enable_expert_parallel": False, "world_size": 1}
    config = SimpleNamespace(quant_config="fp8", parallel_config=SimpleNamespace(**parts))
    hf = SimpleNamespace(to_dict=dict)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0"))
    with verl_site.on_path(verl_site.write(tmp_path)):
        from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer
        from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

        theirs = bucketed_weight_transfer.BucketedWeightReceiver
        extension = vLLMColocateWorkerExtension()
        extension.vllm_config, extension.device, extension.rank = config, torch.device("cpu"), 0
        extension.model_config = SimpleNamespace(hf_config=hf, dtype=torch.bfloat16, quantization="fp8")
        extension.model_runner = SimpleNamespace(model=torch.nn.Linear(2, 2))
        worker = extension.worker_of_trainer
        with pytest.raises(TransferError, match="verl quantizes"):
            worker.ask_map([])
        pairs = [(f"{number}", torch.ones(1)) for number in range(3)]
        worker._load(iter(pairs))
        assert extension.steps == ["before", (pairs, False), ([], True), "after"]
        assert bucketed_weight_transfer.BucketedWeightReceiver is theirs


def has_verl():
    """Whether verl can be run with vLLM's build for CPUs."""
    if any(importlib.util.find_spec(name) is None for name in ("verl", "vllm", "ray", "uvicorn")):
        return False
    try:
        return not torch.cuda.is_available() and bool(importlib.metadata.version("vllm"))
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.skipif(not has_verl(), reason="needs verl, Ray and vLLM on CPUs")
def test_verls_manager_and_worker_give_vllm_the_trainers_log_probs():
    modules = "mcore_bridge.trainers.verl,tests.workers.unpacked"
    environment = {**os.environ, "VERL_USE_EXTERNAL_MODULES": modules, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.workers.verl_rollouts"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    lines = [line[6:] for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-4000:]
    apart, versions, maps = zip(*json.loads(lines[0]), strict=True)
    assert all(0 < distance < 1e-5 for distance in apart), apart
    assert versions == tuple(range(5))
    assert maps == (True, True, True, True, False)
