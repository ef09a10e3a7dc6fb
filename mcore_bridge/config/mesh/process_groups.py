"""A mesh from and to running processes: torch.distributed and megatron-core's ``parallel_state``.

What exists already is kept: a process group that someone made, and a ``parallel_state`` of the same sizes.
"""

from __future__ import annotations

import atexit
import math
import multiprocessing
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from mcore_bridge.errors import MeshError

_SECONDS = 10.0
"""How long the end of a process waits for threads of gloo at most."""
_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def read_sizes() -> dict[str, object]:
    """The sizes of ``ParallelDims`` by name, in ``parallel_state`` as somebody initialised it.

    Raises:
        MeshError: nobody did, or with an axis that we do not have (generalized tensor parallelism of 0.19).
    """
    from megatron.core import parallel_state as state

    if not state.model_parallel_is_initialized():
        raise MeshError(
            "megatron.core.parallel_state is not initialized: call ParallelDims(...).initialize() first, "
            "or megatron's initialize_model_parallel"
        )
    for name in ("get_gtp_weight_remat_world_size", "get_expert_gtp_weight_remat_world_size"):
        size = getattr(state, name)() if hasattr(state, name) else 1
        if size > 1:
            raise MeshError(f"parallel_state.{name}() is {size}, expected 1: weight rematerialization is not supported")
    return {
        "tp": state.get_tensor_model_parallel_world_size(),
        "pp": state.get_pipeline_model_parallel_world_size(),
        "vp": state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "cp": state.get_context_parallel_world_size(),
        "ep": state.get_expert_model_parallel_world_size(),
        "etp": state.get_expert_tensor_parallel_world_size(),
        "hierarchical_context_parallel_sizes": _levels(),
    }


def differing(wanted: Mapping[str, object], found: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """What was ``found`` and what is ``wanted``, where that is not the same. Where None is wanted, anything will do."""
    return {name: (found[name], size) for name, size in wanted.items() if size is not None and size != found[name]}


def _levels() -> tuple[int, ...] | None:
    """Of hierarchical context parallelism, unless its groups are of a mesh before: destroying one leaves them there."""
    import torch.distributed as dist
    from megatron.core import parallel_state as state

    groups = state.get_hierarchical_context_parallel_groups(check_initialized=False) or ()
    own = set(dist.get_process_group_ranks(state.get_context_parallel_group()))
    try:
        levels = [dist.get_process_group_ranks(group) for group in groups]
    except (KeyError, ValueError):  # of processes that have left
        return None
    is_own = math.prod(map(len, levels)) == len(own) and all(own.issuperset(ranks) for ranks in levels)
    return tuple(map(len, levels)) if groups and is_own else None


def world_size() -> int:
    """Ranks of the process group, or of the one that torchrun's environment describes."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else _rank_and_world_size()[1]


def initialize(group_sizes: Mapping[str, Any], *, device: str, seed: int, timeout: timedelta | None) -> None:
    """Join torch.distributed, and make megatron-core's groups, where that was not done yet.

    Args:
        group_sizes: as ``initialize_model_parallel`` takes them.
        device: "cpu" or "cuda".
        timeout: see ``ParallelDims.initialize``.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # set while such a process imports the script
        raise MeshError(
            "this script runs again in a process that it has started: put what starts it below 'if __name__ == "
            '"__main__":\', or it waits here for ranks that do not come'
        )
    import torch.distributed as dist
    from megatron.core import parallel_state

    from mcore_bridge.config.mesh.lost_ranks import note_process

    if device == "cpu":
        from mcore_bridge.cpu import enable_cpu

        enable_cpu()
    if not dist.is_initialized():
        _join(device, timeout)
    note_process()
    if not parallel_state.model_parallel_is_initialized():
        _make_groups(group_sizes, device=device, seed=seed, timeout=timeout)


def require_timeout(timeout: timedelta | None) -> None:
    """Raise ``MeshError`` where that is no length of time."""
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta()):
        raise MeshError(f"timeout must be a positive datetime.timedelta, found {timeout!r}: timedelta(minutes=5)")


def choose_device(device: str | None) -> str:
    """See ``ParallelDims.initialize``."""
    import torch

    available = torch.cuda.is_available()
    if device is None:
        return "cuda" if available else "cpu"
    if device not in ("cpu", "cuda"):
        raise MeshError(f'device must be "cpu" (gloo), "cuda" (nccl) or None, found {device!r}')
    if device == "cuda" and not available:
        raise MeshError('device="cuda" needs a GPU, and torch.cuda.is_available() is False here: use device="cpu"')
    return device


def require_same(sizes: Mapping[str, object]) -> None:
    """Raise ``MeshError`` where ``parallel_state`` is initialised with others than these."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized() and (differ := differing(sizes, read_sizes())):
        raise MeshError(
            f"megatron.core.parallel_state is already initialized with other sizes; its own, and those here: {differ}. "
            "Use ParallelDims.from_mcore(), or call parallel_state.destroy_model_parallel() first"
        )


def _rank_and_world_size() -> tuple[int, int]:
    """What torchrun says in the environment; without it, this process is the only one."""
    if not {"RANK", "WORLD_SIZE"} & os.environ.keys():
        return 0, 1
    missing = [name for name in _RENDEZVOUS if name not in os.environ]
    if missing:
        raise MeshError(
            f"{', '.join(missing)} missing in the environment, where others of {', '.join(_RENDEZVOUS)} are set: "
            "start with torchrun, or unset all for a single process"
        )
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _join(device: str, timeout: timedelta | None) -> None:
    import torch
    import torch.distributed as dist

    rank, world_size = _rank_and_world_size()
    if device == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", rank % torch.cuda.device_count()))
        if local_rank >= torch.cuda.device_count():
            raise MeshError(f"LOCAL_RANK={local_rank} has no GPU: this process sees {torch.cuda.device_count()}")
        torch.cuda.set_device(local_rank)
    atexit.register(_let_gloo_rest)  # of megatron-core's groups some are gloo's on a GPU too
    backend = "nccl" if device == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:  # a store of its own: no port is opened, so that many single processes can run side by side
        store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not re-exported by name
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _let_gloo_rest() -> None:
    """Wait until no thread of gloo is at work, while Python still lets such a thread in.

    A collective can be over for its caller before the thread that ran it has let go of the tensors. That takes Python's
    lock. Once the interpreter has begun to end, Python ends a thread that asks for it, and C++ takes this for an error:
    "terminate called without an active exception". Nobody is waited for here but threads of this process.
    """
    end, before = time.monotonic() + _SECONDS, None
    while (found := _gloo_threads()) and time.monotonic() < end:
        if found == before and not any(state.startswith("R") for state, *_ in found):
            return
        before = found
        time.sleep(0.02)  # gives Python's lock to who waits for it


def _gloo_threads() -> list[tuple[str, ...]]:
    """The state of each, and how often it gave up its processor; none where the system does not say (not Linux)."""
    keys, found = ("State", "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches"), []
    for path in Path("/proc/self/task").glob("*/status"):
        try:
            lines = dict(line.split(":\t", 1) for line in path.read_text().splitlines() if ":\t" in line)
        except OSError:  # it has ended
            continue
        if lines.get("Name") == "pt_gloo_runloop":
            found.append(tuple(lines.get(key, "") for key in keys))
    return found


def _make_groups(group_sizes: Mapping[str, Any], *, device: str, seed: int, timeout: timedelta | None) -> None:
    from megatron.core import parallel_state

    minutes = {} if timeout is None else {"distributed_timeout_minutes": timeout / timedelta(minutes=1)}
    parallel_state.initialize_model_parallel(**group_sizes, **minutes)
    if device == "cuda":
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(seed)
