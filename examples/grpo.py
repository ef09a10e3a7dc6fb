"""GRPO on one node: megatron-core trains, an engine in another process rolls out, weights cross at every step.

    torchrun --nproc-per-node 4 examples/grpo.py --tp 2 --pp 2                   # on CPU, or one GPU for each rank
    torchrun --nproc-per-node 2 examples/grpo.py --tp 2 --engine-device cuda:2   # the engine on a GPU of its own
    torchrun --nproc-per-node 2 examples/grpo.py --tp 2 --engine vllm            # vLLM, in place of transformers
    torchrun --nproc-per-node 2 examples/grpo.py --tp 1 --pp 2 --model FOLDER    # a checkpoint, with real prompts
    torchrun --nproc-per-node 2 examples/grpo.py --tp 2 --images --model FOLDER  # one of images, such as Qwen3-VL

The model is small and random, and the task is to say even tokens. A checkpoint learns to add numbers of two digits.
With ``--images`` each prompt has a random image, and the task is to say even tokens if it is light, or else odd ones.
``make_checkpoint.py FOLDER --images`` writes a small model for it. At every step the engine's log-probabilities of what
it sampled must be the trainer's, or the run ends: a weight that is wrong, missing or stale would show.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from engine_process import ask, started
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from rollout_engine import Engine
from step_record import StepRecord
from tasks import CONFIG, ImageTask, SumTask, Task, followed
from torch import Tensor
from transformers import AutoConfig
from vllm_engine import VllmEngine

import mcore_bridge as mb

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}
"""How far log-probabilities of one token may be apart in two implementations."""


def main() -> None:
    """Train for some steps."""
    arguments = parse()
    dims = mb.ParallelDims(tp=arguments.tp, pp=arguments.pp, cp=arguments.cp, sp=arguments.tp > 1)
    dims.initialize(device=arguments.device)
    dtype = getattr(torch, arguments.dtype)
    hf = AutoConfig.from_pretrained(arguments.model) if arguments.model else AutoConfig.for_model(**CONFIG)
    kind = ImageTask if arguments.images else SumTask if arguments.model else Task
    task = kind(hf, arguments.prompts, arguments.group)
    chunks = mb.build_model(
        arguments.model or hf,
        dims=dims,
        dtype=dtype,
        device=arguments.device,
        load_weights=arguments.model is not None,
        vision="train" if arguments.images else "text_only",
    )
    models, step_optimizer = prepare(chunks, arguments)
    leads = dist.get_rank() == 0  # the rank that asks the engine
    engine: Any = start_engine(arguments, task, dtype) if leads else ()
    with mb.WeightSync(models, engine) as sync:
        for step in range(arguments.steps):
            record = StepRecord(arguments.device)
            if leads:
                ask(engine, "wake")
            record.end("wake")
            sync()
            record.end("sync")
            images = [image for image in task.images(step) for _ in range(task.group)]
            rollout: list[Any] = [None]
            if leads:
                shown = [{name: torch.cat([image[name] for image in images]) for name in images[0]}] if images else []
                prompts = task.prompts(step).repeat_interleave(task.group, 0)
                rollout = [ask(engine, "generate", prompts, task.response, step, *shown)]
                ask(engine, "sleep")
            dist.broadcast_object_list(rollout)
            tokens, log_probs = rollout[0]
            record.end("rollout")
            inputs = [followed(image, arguments.device) for image in images]
            rows = {"micro_batch_size": arguments.micro_batch}
            report = sync.verify(
                tokens, log_probs, atol=arguments.atol or TOLERANCE[dtype], images=inputs or None, **rows
            )
            record.end("verify")
            rewards = task.rewards(tokens[:, -task.response :], step)
            train(models, dims, tokens, inputs, log_probs, rewards, arguments)
            step_optimizer()
            record.end("train")
            if leads:
                print(f"step {step}: reward {rewards.mean():.3f}, {report}", flush=True)
                record.write(arguments.record, step, rewards, report)
    if leads:
        engine.close()
    dist.destroy_process_group()


def train(
    models: Sequence[Any],
    dims: mb.ParallelDims,
    tokens: Tensor,
    images: Sequence[dict[str, Tensor]],
    engine_log_probs: Tensor,
    rewards: Tensor,
    arguments: Namespace,
) -> None:
    """Forward and backward of this replica's share."""
    groups = rewards.view(arguments.prompts, arguments.group)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten()
    share = slice(parallel_state.get_data_parallel_rank(), None, dims.dp(dist.get_world_size()))
    own, old, weight = (values[share].to(arguments.device) for values in (tokens, engine_log_probs, advantages))

    def loss(outputs: mb.TokenOutputs, rows: slice) -> Tensor:
        ratio = (outputs.log_probs[:, -old.shape[1] :] - old[rows]).exp()
        return -torch.minimum(ratio * weight[rows, None], ratio.clamp(0.8, 1.2) * weight[rows, None]).mean()

    for model in models:
        model.zero_grad_buffer()
    mb.forward(models, own, images=images[share] or None, loss=loss, micro_batch_size=arguments.micro_batch)


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


def start_engine(arguments: Namespace, task: Task, dtype: torch.dtype) -> Any:
    """In a process of its own, on the GPU of this rank unless another one is named."""
    own = f"cuda:{torch.cuda.current_device()}" if arguments.device == "cuda" else "cpu"
    make = partial(VllmEngine, tensor_parallel_size=arguments.engine_tp) if arguments.engine == "vllm" else Engine
    return started(make, task.hf.to_dict(), dtype, arguments.engine_device or own)


def parse() -> Namespace:
    """The command line."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    for name in ("tp", "pp", "cp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if on_gpu else "cpu")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--engine-tp", type=int, default=1, help="GPUs of vLLM, from --engine-device on")
    parser.add_argument("--engine-device", help="such as cuda:3; by default that of the first rank")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16" if on_gpu else "float32")
    parser.add_argument("--model", help="HF folder of a checkpoint with its tokenizer; by default a small random model")
    parser.add_argument("--images", action="store_true", help="train --model with images, its tower too")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=4, help="of a step")
    parser.add_argument("--group", type=int, default=8, help="responses to each prompt")
    parser.add_argument("--micro-batch", type=int, default=4, help="rows that the trainer takes at once")
    parser.add_argument("--atol", type=float, help="how far apart log-probs of a token may be; by default by --dtype")
    parser.add_argument("--record", help="file that gets a line of JSON for each step")
    parser.add_argument("--lr", type=float, default=3e-3)
    arguments = parser.parse_args()
    if arguments.engine != "vllm" and arguments.engine_tp != 1:
        parser.error(f"expected --engine vllm with --engine-tp {arguments.engine_tp}, found {arguments.engine}")
    if arguments.images and (arguments.model is None or arguments.engine == "vllm"):
        parser.error("expected --model FOLDER and --engine transformers with --images: name them, or leave it out")
    return arguments


if __name__ == "__main__":
    main()
