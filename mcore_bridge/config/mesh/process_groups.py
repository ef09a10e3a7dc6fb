"""Make the process groups of a mesh, or read the sizes of existing groups.

An existing process group is kept, and so is a ``parallel_state`` with equal sizes.
"""

from __future__ import annotations

import atexit
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_bridge.errors import MeshError

if TYPE_CHECKING:
    from mcore_bridge.config.mesh.alike import Shared

_SECONDS = 10.0
"""The longest time that a process waits for threads of gloo at its end."""
_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def read_sizes() -> dict[str, object]:
    """The sizes in ``parallel_state``, by their names in ``ParallelDims``.

    Raises:
        MeshError: it is not initialised, or has an axis that we do not support (generalized tensor parallelism of
            megatron-core 0.19).
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
            raise MeshError(
                f"parallel_state.{name}() must be 1, found {size}: weight rematerialization is not supported"
            )
    return {
        "tp": state.get_tensor_model_parallel_world_size(),
        "pp": state.get_pipeline_model_parallel_world_size(),
        "vp": state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "cp": state.get_context_parallel_world_size(),
        "ep": state.get_expert_model_parallel_world_size(),
        "etp": state.get_expert_tensor_parallel_world_size(),
        "hierarchical_context_parallel_sizes": _levels(),
    }


def building_groups() -> list[Any]:
    """The groups that, one after the other, reach all ranks of a replica and all ranks that share its experts."""
    from megatron.core import parallel_state as state

    if not state.model_parallel_is_initialized():
        return []
    return [
        state.get_tensor_model_parallel_group(),
        state.get_context_parallel_group(),
        state.get_pipeline_model_parallel_group(),
        state.get_expert_model_parallel_group(),
    ]


def differing(wanted: Mapping[str, object], actual: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """The ``(actual, wanted)`` sizes that differ. A wanted size of None fits any actual size."""
    return {name: (actual[name], size) for name, size in wanted.items() if size is not None and size != actual[name]}


def _levels() -> tuple[int, ...] | None:
    """The sizes of hierarchical context parallelism.

    Its groups may belong to an earlier mesh, since ``destroy_model_parallel`` does not remove them. Such groups are
    ignored.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state as state

    groups = state.get_hierarchical_context_parallel_groups(check_initialized=False) or ()
    own = set(dist.get_process_group_ranks(state.get_context_parallel_group()))
    try:
        levels = [dist.get_process_group_ranks(group) for group in groups]
    except (KeyError, ValueError):  # the group was destroyed
        return None
    is_own = math.prod(map(len, levels)) == len(own) and all(own.issuperset(ranks) for ranks in levels)
    return tuple(map(len, levels)) if groups and is_own else None


def world_size() -> int:
    """The number of ranks in the process group; without one, in the environment of torchrun."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else _rank_and_world_size()[1]


def initialize(check: Callable[[], tuple[str, Shared]], group_sizes: Mapping[str, Any], **options: Any) -> None:
    """Join torch.distributed and make megatron-core's groups, unless that is done already.

    Args:
        check: checks the mesh. Returns the device, "cpu" or "cuda", and the values that must be equal on all ranks.
        group_sizes: arguments of ``initialize_model_parallel``.
        options: seed and timeout, see ``ParallelDims.initialize``.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # set while a child imports the script
        raise MeshError(
            "this script runs again in a process that it has started, and would wait for ranks that never come: put "
            "the code that starts the process below 'if __name__ == \"__main__\":'"
        )
    import torch.distributed as dist
    from megatron.core import parallel_state

    from mcore_bridge.config.mesh.alike import agreed
    from mcore_bridge.config.mesh.lost_ranks import note_process

    if not dist.is_initialized():
        _join(check()[0], options["timeout"])
    note_process()
    device: str = agreed([dist.group.WORLD], check, MeshError)  # type: ignore[list-item]  # there is one now
    if device == "cpu":
        from mcore_bridge.cpu import enable_cpu

        enable_cpu()
    if not parallel_state.model_parallel_is_initialized():
        _make_groups(group_sizes, device=device, **options)


def require_timeout(timeout: timedelta | None) -> None:
    """Raise ``MeshError`` unless ``timeout`` is None or a positive time."""
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta()):
        raise MeshError(
            f"timeout must be a positive datetime.timedelta, found {timeout!r}: pass for example timedelta(minutes=5)"
        )


def choose_device(device: str | None) -> str:
    """The device to use: "cpu" or "cuda"; see ``ParallelDims.initialize``."""
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
    """Raise ``MeshError`` if ``parallel_state`` is initialised with other sizes."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized() and (differ := differing(sizes, read_sizes())):
        raise MeshError(
            "megatron.core.parallel_state is already initialized with other sizes, as (its own, requested): "
            f"{differ}. Use ParallelDims.from_mcore(), or call parallel_state.destroy_model_parallel() first"
        )


def _rank_and_world_size() -> tuple[int, int]:
    """Rank and world size from the environment of torchrun; without it, this process is the only rank."""
    if not {"RANK", "WORLD_SIZE"} & os.environ.keys():
        return 0, 1
    missing = [name for name in _RENDEZVOUS if name not in os.environ]
    if missing:
        raise MeshError(
            f"{', '.join(_RENDEZVOUS)} must all be set in the environment or none, found {', '.join(missing)} missing: "
            "start with torchrun, or unset all of them for a single process"
        )
    numbers = {
        name: _number(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK") if name in os.environ
    }
    wrong = [f"{name}={os.environ[name]!r}" for name, number in numbers.items() if number is None]
    if wrong:
        raise MeshError(
            f"{', '.join(numbers)} must be whole numbers of at least 0 in the environment, found {', '.join(wrong)}: "
            "start with torchrun, or correct what sets them"
        )
    rank, world_size = numbers["RANK"] or 0, numbers["WORLD_SIZE"] or 0
    if rank >= world_size:
        raise MeshError(
            f"RANK must be below WORLD_SIZE in the environment, found RANK={rank} and WORLD_SIZE={world_size}: start "
            "with torchrun, or correct what sets them"
        )
    return rank, world_size


def _number(name: str) -> int | None:
    text = os.environ[name].strip()
    return int(text) if text.isascii() and text.isdecimal() else None


def _join(device: str, timeout: timedelta | None) -> None:
    import torch
    import torch.distributed as dist

    rank, world_size = _rank_and_world_size()
    if device == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", rank % torch.cuda.device_count()))
        if local_rank >= torch.cuda.device_count():
            raise MeshError(
                f"LOCAL_RANK must be below the {torch.cuda.device_count()} GPUs that this process sees, found "
                f"{local_rank}: start fewer ranks on this node"
            )
        torch.cuda.set_device(local_rank)
    atexit.register(_let_gloo_rest)  # some of megatron-core's groups use gloo, also with GPUs
    backend = "nccl" if device == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:  # a store in this process opens no port, so single processes can run side by side
        store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not re-exported by name
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _let_gloo_rest() -> None:
    """Wait until the gloo threads of this process are idle, before the interpreter ends.

    A collective may return before its thread has released the tensors, which needs the GIL. Python kills a thread that
    requests the GIL while the interpreter ends, and C++ then aborts the process: "terminate called without an active
    exception".
    """
    end, before = time.monotonic() + _SECONDS, None
    while (threads := _gloo_threads()) and time.monotonic() < end:
        if threads == before and not any(state.startswith("R") for state, *_ in threads):
            return
        before = threads
        time.sleep(0.02)  # gives the GIL to the threads that wait for it


def _gloo_threads() -> list[tuple[str, ...]]:
    """The state of each gloo thread, and its numbers of context switches. Empty without /proc (not Linux)."""
    keys, threads = ("State", "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches"), []
    for path in Path("/proc/self/task").glob("*/status"):
        try:
            lines = dict(line.split(":\t", 1) for line in path.read_text().splitlines() if ":\t" in line)
        except OSError:  # the thread has ended
            continue
        if lines.get("Name") == "pt_gloo_runloop":
            threads.append(tuple(lines.get(key, "") for key in keys))
    return threads


def _make_groups(group_sizes: Mapping[str, Any], *, device: str, seed: int, timeout: timedelta | None) -> None:
    from megatron.core import parallel_state

    minutes = {} if timeout is None else {"distributed_timeout_minutes": timeout / timedelta(minutes=1)}
    parallel_state.initialize_model_parallel(**group_sizes, **minutes)
    if device == "cuda":
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(seed)
