"""Forward and backward passes of one model after the other, as the benchmarks of training measure them."""

from __future__ import annotations

import gc
import statistics
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from common import MemoryPeak, timed
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

WARM_UP = 3
_WRAPPERS = ("module.", "to_wrap.")
"""What the libraries put into names of parameters."""


@torch.no_grad()
def fill(model: torch.nn.Module) -> None:
    """Give all parameters small random values, the same ones under the same name."""
    for name, parameter in model.named_parameters():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
        parameter.normal_(std=0.02, generator=generator)


def timed_steps(model: Any, inputs: Mapping[str, Any], num_tokens: int, repeats: int) -> dict[str, Any]:
    """Fields of a report: the model in megatron-core's DDP, after some steps that do not count."""
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    losses = []

    def step() -> None:
        wrapped.zero_grad_buffer()
        loss = wrapped(**inputs).float().mean()
        loss.backward()
        losses.append(loss.detach())

    timed(step, WARM_UP)
    memory = MemoryPeak()
    seconds = timed(step, repeats)
    median, peak = statistics.median(seconds), memory.peak()
    wrapped.__dict__.clear()  # hooks of autograd hold it, in a cycle that no collector sees, and it holds the buffers
    return {
        "loss": round(float(losses[-1]), 4),
        "min_s": round(min(seconds), 5),
        "median_s": round(median, 5),
        "tokens_s": round(num_tokens / median),
        "activations_gb": round(peak / 1e9, 3),
    }


def text(num_tokens: int, device: str) -> dict[str, Any]:
    """The inputs of a step: one row of random tokens."""
    generator = torch.Generator(device).manual_seed(1)
    ids = torch.randint(0, 1000, (1, num_tokens), generator=generator, device=device)
    places = torch.arange(num_tokens, device=device)[None]
    return {"input_ids": ids, "position_ids": places, "attention_mask": None, "labels": ids}


def free() -> None:
    """Give back the memory of what nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
