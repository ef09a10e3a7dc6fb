"""vLLM as the engine, to which a trainer's ``WeightSync`` brings weights. It needs no megatron-core."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_bridge.engines.vllm import receive

OURS = {"weight_transfer_config": {"backend": "mcore_bridge"}, "load_format": "dummy", "skip_tokenizer_init": True}
SMALL = {"max_model_len": 128, "gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 1 << 28, "enforce_eager": True}


class VllmEngine:
    """``rollout_engine.Engine`` by vLLM, on GPUs from ``device`` on or on the CPU; ``options`` are its LLM's."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: str, **options: Any) -> None:
        os.environ.update(VLLM_WORKER_MULTIPROC_METHOD="spawn", VLLM_ENABLE_V1_MULTIPROCESSING="0")
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # on CPUs the trainer has the same cores
        if device != "cpu":  # vLLM's first worker is on this GPU, and the others are behind it
            visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
            gpus, first = visible.split(","), torch.device(device).index
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])
        from vllm import LLM

        folder = tempfile.mkdtemp()
        (Path(folder) / "config.json").write_text(json.dumps(dict(config)))
        self.sleeps = options.setdefault("enable_sleep_mode", device != "cpu")
        self.llm = LLM(model=folder, dtype=dtype, **OURS | SMALL | options)
        self.sleep()

    def receive(self, info: Mapping[str, Any]) -> None:
        receive(self.llm, info)

    def sleep(self) -> None:
        if self.sleeps:
            self.llm.sleep(level=2)

    def wake(self) -> None:
        if self.sleeps:
            self.llm.wake_up()

    def generate(self, prompts: Tensor, num_tokens: int, seed: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        from vllm import SamplingParams

        wanted = {"max_tokens": num_tokens, "ignore_eos": True, "detokenize": False, "logprobs": 0}
        seeds = range(seed * len(prompts), (seed + 1) * len(prompts))
        asked = [SamplingParams(**wanted, temperature=temperature, seed=each) for each in seeds]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts.tolist()]
        answers = [answer.outputs[0] for answer in self.llm.generate(inputs, asked, use_tqdm=False)]
        tokens = torch.tensor([list(answer.token_ids) for answer in answers])
        rows = [zip(answer.token_ids, answer.logprobs, strict=True) for answer in answers]
        return torch.cat((prompts, tokens), 1), torch.tensor([[logs[t].logprob for t, logs in row] for row in rows])
