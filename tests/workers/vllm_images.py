"""vLLM in a process of its own, which is shown images."""

import sys
import traceback

import torch

from tests.workers.vllm_rollout import EXAMPLES, Absent


def engine_of(folder, dtype):
    """A process with vLLM for the config and the processor of ``folder``, on one rank of CPU, without weights."""
    sys.path[:0] = [EXAMPLES] if EXAMPLES not in sys.path else []
    from rollout_engine import RemoteEngine

    return RemoteEngine(make_engine, str(folder), dtype)


def make_engine(folder, dtype):
    """In the engine's process."""
    import vllm_engine
    from vllm import LLM

    vllm_engine._prepare_environment("cpu")

    class Seeing(vllm_engine.VllmEngine):
        def __init__(self):
            self._sleeps = self._by_map = False
            self._llm = LLM(
                model=folder,
                dtype=dtype,
                load_format="dummy",
                max_model_len=256,
                max_num_batched_tokens=2048,
                kv_cache_memory_bytes=1 << 28,
                enforce_eager=True,
                limit_mm_per_prompt={"image": 2, "video": 0},
                mm_device_do_normalize=False,  # it is by buffers, which "dummy" overwrites in vLLM 0.32
                worker_extension_cls="tests.workers.rollout_worker.Examined",
            )

        def log_probs(self, prompts):
            """Of tokens and their images: of each, all its tokens and fp32 log-probs, with zero for the first."""
            from vllm import SamplingParams

            asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
            inputs = [{"prompt_token_ids": ids, "multi_modal_data": {"image": images}} for ids, images in prompts]
            answers = self._llm.generate(inputs, asked, use_tqdm=False)
            return [(each.prompt_token_ids, _logs(each)) for each in answers]

    try:
        return Seeing()
    except Exception:
        return Absent(RuntimeError(traceback.format_exc()))


def _logs(answer):
    found = zip(answer.prompt_token_ids[1:], answer.prompt_logprobs[1:], strict=True)
    return torch.tensor([0.0, *(ranked[token].logprob for token, ranked in found)])
