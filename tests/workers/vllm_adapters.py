"""vLLM in a separate process, which serves adapters from folders, and from memory if verl's class is installed."""

import os
import sys
import traceback

import torch

from tests.workers.vllm_rollout import EXAMPLES, Absent


def engine_of(folder, rank, environment, **options):
    """A process with vLLM for the checkpoint in ``folder``, in fp32 on CPU, and for one adapter of this rank."""
    sys.path[:0] = [EXAMPLES] if EXAMPLES not in sys.path else []
    from rollout_engine import RemoteEngine

    return RemoteEngine(make_engine, str(folder), rank, environment, options)


def make_engine(folder, rank, environment, options):
    """In the engine's process."""
    os.environ.update(environment, VLLM_ALLOW_LONG_MAX_MODEL_LEN="1")
    import vllm_engine
    from vllm import LLM

    vllm_engine._prepare_environment("cpu")
    try:
        options |= {"max_model_len": 64, "kv_cache_memory_bytes": 1 << 28, "enforce_eager": True}
        adapters = {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
        return Serving(LLM(model=folder, dtype=torch.float32, skip_tokenizer_init=True, **options, **adapters))
    except Exception:
        return Absent(RuntimeError(traceback.format_exc()))


class Serving:
    """vLLM with one adapter after the other."""

    def __init__(self, llm):
        self._llm = llm

    def receive(self, config):
        """Take an adapter that verl's sender sends, as its server has each worker do after a step."""
        options = {"peft_config": config, "base_sync_done": True, "use_shm": True}
        self._llm.collective_rpc("update_weights_from_ipc", kwargs=options)

    def generate(self, rows, num_tokens, adapter):
        """The likeliest tokens after each row, and their fp32 log-probs, with the adapter of this request or without.

        With adapters vLLM 0.32 returns no log-probs of prompts: its kernels for CPUs raise.
        """
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        request = LoRARequest(**adapter) if adapter else None
        asked = SamplingParams(max_tokens=num_tokens, temperature=0, logprobs=0, ignore_eos=True, detokenize=False)
        self._llm.reset_prefix_cache()  # keys and values of the adapter before
        inputs = [{"prompt_token_ids": row} for row in rows]
        answers = [each.outputs[0] for each in self._llm.generate(inputs, asked, use_tqdm=False, lora_request=request)]
        logs = [[found[token].logprob for token, found in _ranked(answer)] for answer in answers]
        return torch.tensor([list(answer.token_ids) for answer in answers]), torch.tensor(logs)

    def close(self):
        """Nothing is to be given back."""


def _ranked(answer):
    return zip(answer.token_ids, answer.logprobs, strict=True)
