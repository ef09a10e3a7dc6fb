"""Starts one process for each rank of a test on GPUs, each with a GPU or sharing one, and other parts of such tests."""

import contextlib
import os
import secrets
import socket

import pytest
import torch

APART = {"NCCL_MNNVL_ENABLE": "0", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
"""NCCL refuses two ranks on one GPU of a host. As separate hosts they send through sockets, slowly but exactly."""

EXACT = {"NVIDIA_TF32_OVERRIDE": "0", "TRITON_F32_DEFAULT": "ieee"}
"""cuBLAS and Triton then multiply fp32 in fp32. By default TransformerEngine and Triton's kernels round to 10 bits."""


def ranks_per_gpu():
    """The number of ranks on one GPU, which ``pytest --ranks-per-gpu`` has set in the environment."""
    return int(os.environ["RANKS_PER_GPU"])


def ask_for(num_ranks):
    """Skip the test if the GPUs have no place for so many ranks."""
    count = torch.cuda.device_count()
    if count * ranks_per_gpu() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs, found {count}, with {ranks_per_gpu()} ranks on each")


def join_from_afar(rank):
    """Call it before NCCL starts in this process. If GPUs are shared, each rank then looks alone on its host."""
    if ranks_per_gpu() > 1:
        os.environ.update(APART, NCCL_HOSTID=str(rank))


def spawn(function, folder, world_size, *arguments):
    """The result of ``function(rank, world_size, *arguments)`` on each rank; raises the error of a rank, as text.

    The function makes the process group, on a new port.
    """
    ask_for(world_size)
    where = world_size, free_port(), str(folder)
    torch.multiprocessing.spawn(_rank, (*where, function, *arguments), nprocs=world_size)
    return [torch.load(folder / str(rank)) for rank in range(world_size)]


def tune_little():
    """Let Triton choose between two configs of a kernel. Others have dozens, each of which compiles for seconds."""
    with contextlib.suppress(ImportError):
        from triton.runtime.autotuner import Autotuner

        pruned = Autotuner.prune_configs
        Autotuner.prune_configs = lambda kernel, arguments: list(pruned(kernel, arguments))[:2]


def _rank(rank, world_size, port, folder, function, *arguments):
    join_from_afar(rank)
    tune_little()
    os.environ.update(EXACT)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank // ranks_per_gpu()), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.save(function(rank, world_size, *arguments), f"{folder}/{rank}")
    torch.distributed.destroy_process_group()


def free_port():
    """A port on which no process listens. It is below the ports that Linux assigns, since gloo takes some of them."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)  # hypothesis gives ``random`` an equal seed in each process
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return str(port)


def chosen(config, names, option="--families"):
    """The ``names`` that an option selects, such as families; all names without the option."""
    asked = config.getoption(option)
    found = [name for name in names if not asked or name in asked.split(",")]
    return found or pytest.skip(f"none of {asked} is here")


def with_replicas(dims, world_size):
    """The mesh, and how many replicas of it there are."""
    dp = dims.dp(world_size)
    return f"{dims} DP{dp}" if dp > 1 else str(dims)
