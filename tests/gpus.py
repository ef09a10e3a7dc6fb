"""One process for each of the GPUs that a test wants, and what such tests share otherwise."""

import os
import socket

import pytest
import torch


def spawn(function, folder, world_size, *arguments):
    """What ``function(rank, world_size, *arguments)`` returns on each rank; raises what a rank raises, as text.

    The function makes the process group, on a port of its own.
    """
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs, found {torch.cuda.device_count()}")
    where = world_size, free_port(), str(folder)
    torch.multiprocessing.spawn(_rank, (*where, function, *arguments), nprocs=world_size)
    return [torch.load(folder / str(rank)) for rank in range(world_size)]


def _rank(rank, world_size, port, folder, function, *arguments):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.save(function(rank, world_size, *arguments), f"{folder}/{rank}")
    torch.distributed.destroy_process_group()


def free_port():
    """One that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def chosen(config, names):
    """Those of these families that ``--families`` names; all without it."""
    asked = config.getoption("--families")
    found = [name for name in names if not asked or name in asked.split(",")]
    return found or pytest.skip(f"none of {asked} is here")


def with_replicas(dims, world_size):
    """The mesh, and how many replicas of it there are."""
    dp = dims.dp(world_size)
    return f"{dims} DP{dp}" if dp > 1 else str(dims)
