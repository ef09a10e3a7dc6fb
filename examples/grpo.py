"""GRPO on one node: megatron-core trains, an engine in another process rolls out, weights cross at every step.

    torchrun --nproc-per-node 4 examples/grpo.py --tp 2 --pp 2                   # on CPU, or one GPU for each rank
    torchrun --nproc-per-node 2 examples/grpo.py --tp 2 --engine-device cuda:2   # the engine on a GPU of its own
    torchrun --nproc-per-node 2 examples/grpo.py --tp 2 --engine vllm            # vLLM, in place of transformers
    torchrun --nproc-per-node 2 examples/grpo.py --tp 1 --pp 2 --model FOLDER    # a checkpoint, with real prompts
    torchrun --nproc-per-node 2 examples/grpo.py --tp 2 --images --model FOLDER  # one of images, such as Qwen3-VL

The model is small and random, and the task is to say even tokens. For a checkpoint it is to say words with an "e".
With ``--images`` each prompt has a random image, and the task is to say even tokens if it is light, or else odd ones.
``make_checkpoint.py FOLDER --images`` writes a small model for it. At every step the engine's log-probabilities of what
it sampled must be those of the trainer, or the run ends: a weight that is wrong, missing or stale would show.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from rollout_engine import Engine, RemoteEngine
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer
from vllm_engine import VllmEngine

import mcore_bridge as mb

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "tie_word_embeddings": False,
}
PROMPTS, GROUP, PROMPT, RESPONSE = 4, 8, 6, 10
SENTENCES = (
    "The best thing about a long walk in the morning is",
    "My grandmother used to say that good bread needs",
    "When the train stopped in the middle of the night,",
    "A student who wants to learn mathematics should first",
)
"""What a checkpoint continues: as many as ``PROMPTS``, each of at least ``PROMPT`` tokens."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}
"""How far log-probabilities of one token may be apart in two implementations."""


def main() -> None:
    """Train for some steps."""
    arguments = parse()
    dims = mb.ParallelDims(tp=arguments.tp, pp=arguments.pp, cp=arguments.cp, sp=arguments.tp > 1)
    dims.initialize(device=arguments.device)
    dtype = getattr(torch, arguments.dtype)
    task = ImageTask(arguments.model) if arguments.images else Task(arguments.model)
    hf = arguments.model or AutoConfig.for_model(**task.config)
    chunks = mb.build_model(
        hf,
        dims=dims,
        dtype=dtype,
        device=arguments.device,
        load_weights=arguments.model is not None,
        vision="train" if arguments.images else "carried",
    )
    models, step_optimizer = prepare(chunks, arguments)

    leads = dist.get_rank() == 0  # the rank with the engine beside it; others only send it their part
    target: Any = "everything" if leads else "nothing"
    manifest = mb.manifest(chunks, target=target)  # of all ranks together, as an export is
    if leads:
        device = arguments.engine_device or default_device(arguments.device)
        engine = make_engine(arguments, task.config, dtype, device)
        ring = mb.BufferRing(
            mb.plan_buckets(manifest, num_slots=2, slot_bytes=1 << 20 if arguments.model is None else None)
        )
        engine("connect", ring.plan, *(ring.handles() for _ in range(arguments.engine_tp)))
    for step in range(arguments.steps):
        pairs = mb.iter_hf_weights(chunks, target=target)
        if leads:
            engine("wake")
            engine.sync(ring, pairs)
        else:
            list(pairs)
        rollout: list[Any] = [None]
        images = [image for image in task.images(step) for _ in range(GROUP)]
        if leads:
            shown = [{name: torch.cat([image[name] for image in images]) for name in images[0]}] if images else []
            rollout = [engine("generate", task.prompts(step).repeat_interleave(GROUP, 0), RESPONSE, step, *shown)]
            engine("sleep")
        dist.broadcast_object_list(rollout)
        tokens, engine_log_probs = rollout[0]
        rewards = task.rewards(tokens[:, PROMPT:])
        apart = train(models, dims, tokens, images, engine_log_probs, rewards, arguments.device)
        step_optimizer()
        if leads:
            print(
                f"step {step}: reward {rewards.mean():.3f}, log-probs of engine and trainer {apart:.1e} apart",
                flush=True,
            )
        if not apart < TOLERANCE[dtype]:
            raise RuntimeError(
                f"the engine's log-probs are {apart} from the trainer's: its weights are not the trainer's"
            )
    if leads:
        engine.close()
        ring.close()
    dist.destroy_process_group()


class Task:
    """What is said, and how good it is: random prompts for a random model, or sentences for a checkpoint."""

    def __init__(self, folder: str | None) -> None:
        self.config = CONFIG
        self._prompts: Tensor | None = None
        if folder is None:
            self._is_good = torch.arange(CONFIG["vocab_size"]) % 2 == 0
            return
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.config = AutoConfig.from_pretrained(folder).to_dict()
        self._prompts = torch.tensor([tokenizer(text).input_ids[:PROMPT] for text in SENTENCES])
        words = [tokenizer.decode([token]) for token in range(self.config["vocab_size"])]
        self._is_good = torch.tensor(["e" in word for word in words])

    def prompts(self, step: int) -> Tensor:
        """``[PROMPTS, PROMPT]`` of tokens."""
        if self._prompts is not None:
            return self._prompts
        generator = torch.Generator().manual_seed(step)
        return torch.randint(0, self.config["vocab_size"], (PROMPTS, PROMPT), generator=generator)

    def images(self, step: int) -> list[dict[str, Tensor]]:
        """For each prompt what a processor makes of its image; empty without images."""
        return []

    def rewards(self, responses: Tensor) -> Tensor:
        """Of each of ``responses`` ``[batch, tokens]``, the share of good tokens."""
        return self._is_good[responses].float().mean(1)


class ImageTask(Task):
    """Half of the prompts have a light image of noise, and half a dark one: what is good to say depends on it."""

    def __init__(self, folder: str) -> None:
        hf = AutoConfig.from_pretrained(folder)
        self.config, self._token, self._vision = hf.to_dict(), hf.image_token_id, hf.vision_config
        self._ends = hf.vision_start_token_id, hf.vision_end_token_id
        special = {self._token, hf.video_token_id, *self._ends}
        self._text = torch.tensor([token for token in range(hf.text_config.vocab_size) if token not in special])
        self._light = torch.arange(PROMPTS) % 2 == 0

    def prompts(self, step: int) -> Tensor:
        """``[PROMPTS, PROMPT]`` of tokens: an image of two features, and random text on both sides."""
        generator = torch.Generator().manual_seed(step)
        places = torch.randint(0, len(self._text), (PROMPTS, PROMPT), generator=generator)
        prompts = self._text[places]
        prompts[:, 1:5] = torch.tensor([self._ends[0], self._token, self._token, self._ends[1]])
        return prompts

    def images(self, step: int) -> list[dict[str, Tensor]]:
        """Its pixels by patches, its grid of patches, and which tokens of the prompt stand for it."""
        generator = torch.Generator().manual_seed(step)
        merged = self._vision.spatial_merge_size
        size = 3 * self._vision.temporal_patch_size * self._vision.patch_size**2
        types = (self.prompts(step) == self._token).long()
        return [
            {
                "pixel_values": torch.randn(2 * merged**2, size, generator=generator) * 0.3 + (0.7 if light else -0.7),
                "image_grid_thw": torch.tensor([[1, merged, 2 * merged]]),
                "mm_token_type_ids": types[prompt : prompt + 1],
            }
            for prompt, light in enumerate(self._light)
        ]

    def rewards(self, responses: Tensor) -> Tensor:
        """Of each of ``responses`` ``[batch, tokens]``, the share of even tokens, or of odd ones for a dark image."""
        light = self._light.repeat_interleave(GROUP)[:, None]
        return ((responses % 2 == 0) == light).float().mean(1)


def followed(image: Mapping[str, Tensor], device: str) -> dict[str, Tensor]:
    """What stands for an image in a whole row: only in the prompt, since a response may have such tokens, too."""
    types = torch.nn.functional.pad(image["mm_token_type_ids"], (0, RESPONSE))
    return {name: value.to(device) for name, value in {**image, "mm_token_type_ids": types}.items()}


def train(
    models: Sequence[Any],
    dims: mb.ParallelDims,
    tokens: Tensor,
    images: Sequence[Mapping[str, Tensor]],
    engine_log_probs: Tensor,
    rewards: Tensor,
    device: str,
) -> float:
    """Forward and backward of this replica's share; how far apart log-probs were."""
    from megatron.core import parallel_state

    groups = rewards.view(PROMPTS, GROUP)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten()
    share = slice(parallel_state.get_data_parallel_rank(), None, dims.dp(dist.get_world_size()))
    own, old, weight = (each[share].to(device) for each in (tokens, engine_log_probs, advantages))

    def loss(outputs: mb.TokenOutputs, rows: slice) -> Tensor:
        assert outputs.log_probs is not None
        ratio = (outputs.log_probs[:, PROMPT:] - old[rows]).exp()
        return -torch.minimum(ratio * weight[rows, None], ratio.clamp(0.8, 1.2) * weight[rows, None]).mean()

    for model in models:
        model.zero_grad_buffer()
    shown = [followed(image, device) for image in images[share]] or None
    found = mb.forward(models, own, images=shown, loss=loss, micro_batch_size=4)
    assert found.log_probs is not None
    apart = (found.log_probs[:, PROMPT:] - old).abs().max()
    dist.all_reduce(apart, dist.ReduceOp.MAX)
    return float(apart)


def prepare(chunks: Sequence[Any], arguments: Namespace) -> tuple[list[Any], Callable[[], object]]:
    """megatron-core's DDP and a step of its distributed optimizer; on CPU, where that cannot run, of torch's Adam."""
    on_gpu = arguments.device == "cuda"
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=on_gpu)
    chunks[0].config.finalize_model_grads_func = finalize_model_grads
    models = [DistributedDataParallel(chunk.config, settings, chunk) for chunk in chunks]
    if on_gpu:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        bf16 = arguments.dtype == "bfloat16"
        config = OptimizerConfig(lr=arguments.lr, weight_decay=0.0, bf16=bf16, use_distributed_optimizer=True)
        optimizer = get_megatron_optimizer(config, models)
        return models, optimizer.step
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    adam = torch.optim.Adam(parameters, lr=arguments.lr)

    def step() -> None:
        for parameter in parameters:
            parameter.grad = parameter.main_grad.to(parameter.dtype)
        adam.step()

    return models, step


def make_engine(arguments: Namespace, config: Mapping[str, Any], dtype: torch.dtype, device: str) -> RemoteEngine:
    """In a process of its own."""
    by_map = arguments.engine_loads == "by-map"
    if arguments.engine == "vllm":
        return RemoteEngine(VllmEngine, config, dtype, device, arguments.engine_tp, None if by_map else False)
    return RemoteEngine(Engine, config, dtype, device, by_map)


def default_device(device: str) -> str:
    """The engine is colocated with the rank that it belongs to."""
    return f"cuda:{torch.cuda.current_device()}" if device == "cuda" else "cpu"


def parse() -> Namespace:
    """The command line."""
    parser = ArgumentParser(description=__doc__)
    for name in ("tp", "pp", "cp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if on_gpu else "cpu")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--engine-tp", type=int, default=1, help="GPUs of vLLM, from --engine-device on")
    parser.add_argument(
        "--engine-loads",
        choices=("by-map", "by-loader"),
        default="by-map",
        help="copy into the engine's parameters by a map of its loader, or run the loader every time (vLLM on CPUs)",
    )
    parser.add_argument("--engine-device", help="such as cuda:3; by default that of the first rank")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16" if on_gpu else "float32")
    parser.add_argument("--model", help="HF folder of a checkpoint with its tokenizer; by default a small random model")
    parser.add_argument("--images", action="store_true", help="train --model with images, its tower too")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=3e-3)
    arguments = parser.parse_args()
    if arguments.engine != "vllm" and arguments.engine_tp != 1:
        parser.error(f"expected --engine vllm with --engine-tp {arguments.engine_tp}, found {arguments.engine}")
    if arguments.images and (arguments.model is None or arguments.engine == "vllm"):
        parser.error("expected --model FOLDER and --engine transformers with --images: name them, or leave it out")
    return arguments


if __name__ == "__main__":
    main()
