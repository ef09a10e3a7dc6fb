"""vLLM in place of transformers' model: its worker reads the trainer's buffers; on GPUs it sleeps without its memory.

Needs torch, vLLM and ``mcore_bridge.Receiver``; no megatron-core. Its requests are those of ``rollout_engine.Engine``.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mcore_bridge as mb
from mcore_bridge.engines.vllm import name_loaders, reload

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class WeightReceiver:
    """What vLLM's worker can do besides: ``worker_extension_cls`` adds this class to it."""

    model_runner: Any
    model_config: Any
    device: torch.device
    rank: int

    def connect_trainer(self, plan: Any, handles: Sequence[Any], by_map: bool = False) -> None:
        """Open the buffers of the trainer, by the handles of this worker.

        With ``by_map`` vLLM's loader is run once, before the first weights come, and read off as a map. From then on
        buckets are copied into vLLM's parameters by it, without the loader.
        """
        self._receiver = mb.Receiver(plan, handles[self.rank])
        self._by_map, self._engine = by_map, None
        name_loaders(self.model_runner.model)

    @torch.no_grad()
    def forget_weights(self) -> None:
        """Leave nothing in memory that anybody could mistake for weights."""
        for parameter in self.model_runner.model.parameters():
            parameter.fill_(torch.nan)

    def make_map(self) -> None:
        """Find out where vLLM's loader, with all that it does after loading, puts which slice of which tensor."""
        import vllm

        name = f"vllm {vllm.__version__}, {type(self.model_runner.model).__name__}, worker {self.rank}"
        self._engine = mb.map_engine(self._receiver.plan, self.model_runner.model, self.reload, engine=name)

    def reload(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        """Load by vLLM's own loader, layer by layer, and bring each into the form that its kernels take."""
        reload(self.model_runner.model, self.model_config, self.device, pairs)

    def load_bucket(self, number: int) -> None:
        """Take the weights of a bucket out of its slot: by the map where there is one."""
        if not self._by_map:
            self.load_by_loader(number)
            return
        if self._engine is None:
            self.make_map()
        self._receiver.copy_into(number, self._engine)

    def load_by_loader(self, number: int) -> None:
        """Take the weights of a bucket out of its slot, by the names of the checkpoint; vLLM fuses and cuts them.

        It keeps what it is given until a layer is complete and can be brought into the form that its kernels take: what
        it is given are copies, therefore, since the next bucket has the same slot; and on its own GPU, since vLLM's
        memory, which can sleep, takes nothing from another.
        """
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        model = self.model_runner.model
        with self._receiver.open(number) as pairs, torch.device(self.device):
            if number == 0:
                initialize_layerwise_reload(model)
            model.load_weights([(name, tensor.to(self.device, copy=True)) for name, tensor in pairs])

    def finish_round(self) -> None:
        """Every weight has come, or this raises."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        self._receiver.finish()
        if not self._by_map:
            with torch.device(self.device):
                finalize_layerwise_reload(self.model_runner.model, self.model_config)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # whichever stream vLLM computes on next

    def disconnect_trainer(self) -> None:
        """Let go of the buffers."""
        self._receiver.close()


class VllmEngine:
    """``rollout_engine.Engine``, computed by vLLM on ``tensor_parallel`` GPUs, the first of which is ``device``.

    Or, where vLLM was built for it, on the CPU, where it has no sleep. There its kernels have copies of weights in a
    form of their own, which no map reaches: weights go by its loader, as they do with ``by_map=False``. Further
    ``options`` are those of its ``LLM``.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        dtype: torch.dtype,
        device: str,
        tensor_parallel: int = 1,
        by_map: bool | None = None,
        **options: Any,
    ) -> None:
        _prepare_environment(device)
        from vllm import LLM

        self._sleeps = options.setdefault("enable_sleep_mode", device != "cpu")
        self._by_map = device != "cpu" if by_map is None else by_map
        folder = tempfile.mkdtemp()
        (Path(folder) / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], **config}))
        self._llm = LLM(
            model=folder,
            dtype=dtype,
            tensor_parallel_size=tensor_parallel,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=128,
            gpu_memory_utilization=0.02,
            kv_cache_memory_bytes=1 << 28,
            enforce_eager=True,
            **{"worker_extension_cls": "vllm_engine.WeightReceiver", **options},
        )
        self.sleep()

    def sleep(self) -> None:
        """Give the memory of weights and caches back; what was in it is lost."""
        if self._sleeps:
            self._llm.sleep(level=2)

    def wake(self) -> None:
        """Take memory again, with nothing in it that anybody could mistake for weights."""
        if self._sleeps:
            self._llm.wake_up()
        self._llm.collective_rpc("forget_weights")

    def connect(self, plan: Any, *handles: Any) -> None:
        """Open the buffers of the trainer; each worker has ``handles`` of its own."""
        self._llm.collective_rpc("connect_trainer", args=(plan, handles, self._by_map))

    def load(self, number: int) -> None:
        """Take the weights of a bucket out of its slot."""
        self._llm.collective_rpc("load_bucket", args=(number,))

    def finish(self) -> None:
        """End of a round: every weight has come, or this raises. What was computed with older weights is forgotten."""
        self._llm.collective_rpc("finish_round")
        self._llm.reset_prefix_cache()
        self._llm.llm_engine.engine_core.reset_encoder_cache()  # what a tower made of images

    def generate(self, prompts: Tensor, num_tokens: int, seed: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Sample ``num_tokens`` for each of ``prompts`` ``[batch, prompt]``; at ``temperature`` 0 the likeliest.

        Returns:
            ``[batch, prompt + num_tokens]`` of tokens, and fp32 ``[batch, num_tokens]`` of their log-probabilities.
        """
        from vllm import SamplingParams

        wanted = {"max_tokens": num_tokens, "ignore_eos": True, "detokenize": False, "logprobs": 0}
        seeds = range(seed * len(prompts), (seed + 1) * len(prompts))
        asked = [SamplingParams(**wanted, temperature=temperature, seed=each) for each in seeds]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts.tolist()]
        answers = [each.outputs[0] for each in self._llm.generate(inputs, asked, use_tqdm=False)]
        sampled = torch.tensor([list(answer.token_ids) for answer in answers])
        logs = [
            [found[token].logprob for token, found in zip(answer.token_ids, answer.logprobs, strict=True)]
            for answer in answers
        ]
        return torch.cat((prompts, sampled), 1), torch.tensor(logs)

    def close(self) -> None:
        """Let go of the buffers."""
        self._llm.collective_rpc("disconnect_trainer")


def _prepare_environment(device: str) -> None:
    """This engine's GPUs first, the others behind them, and no rank of the trainer. Before CUDA starts here."""
    for name in [*TORCHRUN, *(name for name in os.environ if name.startswith("TORCHELASTIC_"))]:
        os.environ.pop(name, None)
    if device == "cpu":
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # the trainer has the same cores
    else:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        gpus = visible.split(",")
        first = torch.device(device).index
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # handles reach the worker as they are
