"""Shared by the benchmarks of steps: turns of several libraries, and forward and backward passes of their models."""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import zlib
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from common import MemoryPeak, case_arguments, parsed, set_up, timed
from export import leave_mesh
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from transformers import PretrainedConfig

WARM_UP = 3
_WRAPPERS = ("module.", "to_wrap.", "language_model.", "vision.")
"""Parts that the libraries add to names of parameters."""
Built = TypeVar("Built")
Build = Callable[[Path, dict[str, int], Namespace], Built]
"""A function of a library that builds a model for a folder with a config, on a mesh of given sizes."""


def step_arguments(description: str | None, builds: Mapping[str, Build[Any]]) -> ArgumentParser:
    """The arguments of a benchmark in which libraries take turns."""
    parser = case_arguments(description, "a model and its mesh, of one pipeline stage: 'qwen3-8b tp=2 sp=1'")
    parser.add_argument("--site", type=Path)
    parser.add_argument("--only", default=",".join(builds), help="names of libraries")
    parser.add_argument("--tokens", type=int, default=4096, help="in a sequence")
    parser.add_argument("--turns", type=int, default=2)
    return parser


def in_turns(
    arguments: Namespace, builds: Mapping[str, Build[Built]], config_of: Callable[[str, int | None], PretrainedConfig]
) -> Iterator[tuple[dict[str, Any], Callable[[], Built]]]:
    """Yield fields of a report and a function that builds, for each case, turn and library.

    A built model must be dropped before the next one.
    """
    if "megatron_bridge" in arguments.only:
        if arguments.site is None:
            sys.exit("megatron_bridge needs --site; --only ours goes without")
        sys.path.append(str(arguments.site / "megatron_bridge"))
    for case in arguments.cases:
        name, layers, sizes = parsed(case)
        set_up(Namespace(**sizes, device=arguments.device))
        with tempfile.TemporaryDirectory() as folder:
            config_of(name, layers).save_pretrained(folder)
            for turn in range(arguments.turns):
                for library in arguments.only.split(","):
                    fields = {"case": case, "library": library, "turn": turn}
                    yield fields, partial(builds[library], Path(folder), sizes, arguments)
                    free()
        leave_mesh()
    dist.destroy_process_group()


@torch.no_grad()
def fill(model: torch.nn.Module) -> None:
    """Give all parameters small random values, which depend on the name."""
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
    """Free unused memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
