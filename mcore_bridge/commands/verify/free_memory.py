"""Checks whether a model in fp32 fits into memory, before it is built. All ranks get the same answer."""

from __future__ import annotations

import math

import torch

from mcore_bridge.commands import text
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.weights.transfer.collectives import Group

USABLE = 0.8
"""The fraction of the free memory that we use."""

_BYTES = 4  # of an fp32 number


def shortage(num_parameters: int, dims: ParallelDims, device: str) -> str:
    """Why a model in fp32 does not fit into memory; "" if it fits. The answer is the same on every rank."""
    world, free = Group(None), free_memory()
    replicas = math.ceil(world.size / (dims.tp * dims.pp)) if device == "cpu" else 1
    need = num_parameters * _BYTES * replicas
    short = "" if need < USABLE * free else f"{text.num_bytes(need)} of memory, {text.num_bytes(free)} are free"
    if device == "cuda":
        here = num_parameters * _BYTES // (dims.tp * dims.pp)
        free = torch.cuda.mem_get_info()[0]
        if here > USABLE * free:
            short = f"{text.num_bytes(here)} of each GPU, {text.num_bytes(free)} are free on one"
    said = world.all_gather_object(short)
    return next((f"the model in fp32 needs {short}" for short in said if short), "")


def free_memory() -> int:
    import psutil

    return int(psutil.virtual_memory().available)
