"""vLLM in a process of its own, fed by a trainer: what its tests on GPUs and on CPU share."""

import os
import sys
import traceback
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

import mcore_bridge as mb
from tests.support.gpus import ranks_per_gpu
from tests.workers.rollout_families import ENGINE_FIELDS

SHARING = {
    "worker_cls": "tests.workers.rollout_worker.Sharing",
    "distributed_executor_backend": "mp",
    "disable_custom_all_reduce": True,
}
"""Options of vLLM whose ranks share a GPU."""
EXAMPLES = str(Path(__file__).parent.parent.parent / "examples")


def engine_of(family, hf, tensor_parallel, device="cuda:0", dtype=torch.bfloat16, **options):
    """A process with vLLM in it; it never sleeps, since it measures the memory of a GPU that others use as well."""
    sys.path[:0] = [EXAMPLES] if EXAMPLES not in sys.path else []
    from rollout_engine import RemoteEngine

    fields = {
        **hf.to_dict(),
        "architectures": [CLASSES.get(hf.model_type)],
        "dtype": str(dtype).removeprefix("torch."),
        **ENGINE_FIELDS.get(family, {}),
    }
    return RemoteEngine(make_engine, fields, dtype, device, tensor_parallel, options)


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
    from vllm_engine import VllmEngine

    from tests.workers.rollout_worker import register_configs

    register_configs()
    if device == "cpu" and options.get("by_map"):
        _custom_ops._supports_onednn = False  # whose kernels have weights in a form of their own, out of reach of a map

    class Awake(VllmEngine):
        def sleep(self):
            pass

        def wake(self):
            self._llm.collective_rpc("forget_weights")

        def digests(self):
            """Of the weights of each worker, by vLLM's names."""
            return self._llm.collective_rpc("digests")

        def load_folder(self, folder):
            """Take all weights from a checkpoint's files."""
            self._llm.collective_rpc("load_folder", args=(folder,))
            self._llm.reset_prefix_cache()

        def by_map(self):
            """Whether each worker has its weights by a map, whole: their version, and why not; what goes by loader."""
            return self._llm.collective_rpc("by_map")

        def prompt_log_probs(self, tokens):
            """Of ``tokens`` ``[batch, seq]`` as a prompt: fp32 ``[batch, seq - 1]``."""
            from vllm import SamplingParams

            asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
            answers = self._llm.generate([{"prompt_token_ids": row} for row in tokens.tolist()], asked, use_tqdm=False)
            rows = zip(tokens.tolist(), answers, strict=True)
            return torch.tensor(
                [
                    [found[token].logprob for token, found in zip(row[1:], answer.prompt_logprobs[1:], strict=True)]
                    for row, answer in rows
                ]
            )

    (name,) = fields["architectures"]
    if name not in ModelRegistry.get_supported_archs():
        return Absent(NotImplementedError(f"vLLM has no {name}"))
    try:
        options = {
            **options,
            "gdn_prefill_backend": "triton",
            "worker_extension_cls": "tests.workers.rollout_worker.Examined",
        }
        return Awake(fields, dtype, device, tensor_parallel, **options)
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
