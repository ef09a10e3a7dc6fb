"""vLLM in a process of its own, fed by a trainer: what its tests on GPUs and on CPU share."""

import os
import traceback

import torch
from safetensors.torch import save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

import mcore_bridge as mb
from mcore_bridge.engines.vllm import log_probs
from tests.support.gpus import ranks_per_gpu
from tests.support.remote_engine import RemoteEngine, VllmEngine
from tests.workers.rollout_families import ENGINE_FIELDS

SHARING = {
    "worker_cls": "tests.workers.rollout_worker.Sharing",
    "distributed_executor_backend": "mp",
    "disable_custom_all_reduce": True,
}
"""Options of vLLM whose ranks share a GPU."""
EXAMINED = "tests.workers.rollout_worker.Examined"
ON_CPU = {
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
"""The environment of an engine that is no ``VllmEngine``."""


def engine_of(family, hf, tensor_parallel, device="cuda:0", dtype=torch.bfloat16, **options):
    """A process with vLLM in it; it never sleeps, since it measures the memory of a GPU that others use as well."""
    fields = {
        **hf.to_dict(),
        "architectures": [CLASSES.get(hf.model_type)],
        "dtype": str(dtype).removeprefix("torch."),
        **ENGINE_FIELDS.get(family, {}),
    }
    return RemoteEngine(make_engine, fields, dtype, device, tensor_parallel, options)


class Fed(VllmEngine):
    """The example's engine, always awake, which takes weights out of the slots of a ring.

    Args:
        takes_by_map: whether by a map of vLLM's loader, or by the loader.
        arguments, options: as for ``VllmEngine``.
    """

    def __init__(self, takes_by_map, *arguments, **options):
        self.takes_by_map = takes_by_map
        super().__init__(*arguments, weight_transfer_config=None, worker_extension_cls=EXAMINED, **options)

    def sleep(self):
        pass

    def wake(self):
        self.llm.collective_rpc("forget_weights")

    def connect(self, plan, *handles):
        """Open the slots of the trainer; each worker has ``handles`` of its own."""
        self.llm.collective_rpc("connect_trainer", args=(plan, handles, self.takes_by_map))

    def load(self, number):
        """Take the weights of a bucket out of its slot."""
        self.llm.collective_rpc("load_bucket", args=(number,))

    def finish(self):
        """Every weight has come, or this raises. What was computed with older weights is forgotten."""
        self.llm.collective_rpc("finish_round")
        self.llm.reset_prefix_cache()
        self.llm.llm_engine.engine_core.reset_encoder_cache()  # what a tower made of images

    def digests(self):
        """Of the weights of each worker, by vLLM's names."""
        return self.llm.collective_rpc("digests")

    def load_folder(self, folder):
        """Take all weights from a checkpoint's files."""
        self.llm.collective_rpc("load_folder", args=(folder,))
        self.llm.reset_prefix_cache()

    def by_map(self):
        """Whether each worker has its weights by a map, whole: their version, and why not; what goes by loader."""
        return self.llm.collective_rpc("by_map")

    def prompt_log_probs(self, tokens):
        """Of ``tokens`` ``[batch, seq]`` as a prompt: fp32 ``[batch, seq - 1]``."""
        return torch.tensor(log_probs(self.llm, tokens.tolist()))


class Absent:
    """A placeholder for an engine that could not be made: every call returns the error."""

    def __init__(self, error):
        self._error = error

    def __getattr__(self, name):
        raise self._error


def make_engine(fields, dtype, device, tensor_parallel, options):
    """In the engine's process."""
    os.environ.update(VLLM_ALLOW_LONG_MAX_MODEL_LEN="1", VLLM_USE_DEEP_GEMM="0")
    if device == "cpu":
        os.environ["VLLM_MLA_DISABLE"] = "1"  # for whose own way it has no kernels there
    elif ranks_per_gpu() > 1:
        os.environ["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"
        options = {**options, **SHARING}
    from vllm import ModelRegistry, _custom_ops

    from tests.workers.rollout_worker import register_configs

    register_configs()
    by_map = options.pop("by_map", device != "cpu")
    if device == "cpu" and by_map:
        _custom_ops._supports_onednn = False  # whose kernels have weights in a form of their own, out of reach of a map

    (name,) = fields["architectures"]
    if name not in ModelRegistry.get_supported_archs():
        return Absent(NotImplementedError(f"vLLM has no {name}"))
    try:
        options |= {"gdn_prefill_backend": "triton", "tensor_parallel_size": tensor_parallel}
        return Fed(by_map, fields, dtype, device, **options)
    except Exception:
        return Absent(RuntimeError(traceback.format_exc()))


def feed(engine, models, slot_bytes, consumers):
    """One round through buffers of this size."""
    ring = mb.BufferRing(mb.plan_buckets(mb.manifest(models), slot_bytes=slot_bytes))
    engine("connect", ring.plan, *(ring.handles() for _ in range(consumers)))
    engine("wake")
    engine.sync(ring, mb.iter_hf_weights(models))
    return ring


def held_as_from_files(engine, state, folder):
    """Discard all weights, read them from files, and compare the bits with the transferred weights."""
    fed = engine("digests")
    engine("wake")
    assert all(before != digests for before, digests in zip(fed, engine("digests"), strict=True))
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    engine("load_folder", str(folder))
    read = engine("digests")
    differing = [name for one, other in zip(fed, read, strict=True) for name in one if one[name] != other.get(name)]
    assert not differing, f"vLLM holds otherwise than from files: {differing}"
