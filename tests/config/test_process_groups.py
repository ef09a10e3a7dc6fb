"""Process groups of a mesh, made or read in real processes: gloo, torchrun's environment, ``parallel_state``."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_bridge.config.mesh import process_groups
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.config.mesh.process_groups import _rank_and_world_size
from mcore_bridge.errors import MeshError
from tests.support import pool
from tests.support.gpus import free_port


def meet(file: str, fields: dict[str, Any], wrong: dict[str, Any], environment: dict[str, str]) -> None:
    """Runs in a process without a process group: this mesh is made and read back, and another mesh raises."""
    import torch.distributed as dist
    from megatron.core import parallel_state as state

    def refusal(action: Callable[[], object]) -> str | None:
        try:
            action()
        except MeshError as error:
            return str(error)
        return None

    os.environ.update(environment)
    dims = ParallelDims(**fields)
    found = {
        "before": refusal(ParallelDims.from_mcore),
        "world": refusal(ParallelDims(**wrong).initialize),
        "untouched": not dist.is_initialized(),
        "device": refusal(lambda: dims.initialize(device="cuda")),
        "name": refusal(lambda: dims.initialize(device="tpu")),
        "timeout": refusal(lambda: dims.initialize(device="cpu", timeout=30)),  # type: ignore[arg-type]
    }
    dims.initialize(device="cpu", timeout=timedelta(minutes=7))
    group = dist.group.WORLD
    dims.initialize()  # a second call for an equal mesh does nothing
    found |= {
        "same": ParallelDims.from_mcore(sp=dims.sp) == dims and dist.group.WORLD is group,
        "backend": dist.get_backend(),
        "other": refusal(ParallelDims(cp=dims.dp(dist.get_world_size()) + 1).initialize),
        "rank": [dist.get_rank(), state.get_tensor_model_parallel_rank(), state.get_pipeline_model_parallel_rank()],
        "data": [state.get_data_parallel_world_size(), state.get_expert_data_parallel_world_size()],
        "vp": state.get_virtual_pipeline_model_parallel_world_size(),
        "timeouts": [
            each._get_backend(torch.device("cpu")).options._timeout / timedelta(minutes=1)
            for each in (group, state.get_pipeline_model_parallel_group(), state.get_expert_model_parallel_group())
        ],
    }
    Path(file).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def met(folder: Path, fields: dict[str, Any], wrong: dict[str, Any], ranks: list[dict[str, str]]) -> list[Any]:
    files = [folder / str(rank) for rank in range(len(ranks))]
    processes = pool.started(meet, [(str(file), fields, wrong, rank) for file, rank in zip(files, ranks, strict=True)])
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * len(ranks)
    return [json.loads(file.read_text()) for file in files]


def _start(script: str, fields: dict[str, Any], **environment: str) -> "subprocess.Popen[str]":
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", script, json.dumps(fields)],
        env={**clean, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _finish(process: "subprocess.Popen[str]") -> dict[str, Any]:
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error[-3000:]
    return dict(json.loads(next(line for line in out.splitlines() if line.startswith("FOUND "))[6:]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what a machine without GPU answers")
def test_a_single_process_needs_no_environment(tmp_path: Path) -> None:
    (found,) = met(tmp_path, {}, {"tp": 2}, [{}])
    assert "parallel_state is not initialized" in found["before"]
    assert found["world"].startswith("1 ranks are not a multiple of tp=2")
    assert found["untouched"]
    assert found["same"]
    assert "needs a GPU" in found["device"]
    assert "found 'tpu'" in found["name"]
    assert found["timeout"].startswith("timeout must be a positive datetime.timedelta, found 30")
    assert (found["backend"], found["rank"], found["data"]) == ("gloo", [0, 0, 0], [1, 1])
    assert "already initialized with other sizes, as (its own, requested): {'cp': (1, 2)}" in found["other"]


def test_two_processes_meet_as_torchrun_says(tmp_path: Path) -> None:
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [{"RANK": str(rank), **environment} for rank in range(2)]
    found = met(tmp_path, {"pp": 2, "vp": 3}, {"tp": 3}, ranks)
    assert all(f["same"] and f["untouched"] for f in found)
    assert [f["rank"] for f in found] == [[0, 0, 0], [1, 0, 1]]
    assert [f["data"] for f in found] == [[1, 1], [1, 1]]
    assert [f["vp"] for f in found] == [3, 3]
    assert [f["timeouts"] for f in found] == [[7.0] * 3] * 2


GPU_SCRIPT = """
import json, sys, torch, torch.distributed as dist
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
dims = ParallelDims(**json.loads(sys.argv[1]))
dims.initialize()
dims.initialize(device="cuda")
from megatron.core import parallel_state as state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
group = state.get_tensor_model_parallel_group()
ones = torch.ones(1, device="cuda")
dist.all_reduce(ones, group=group)
found = {
    "same": ParallelDims.from_mcore(sp=dims.sp) == dims,
    "backend": dist.get_backend(group),
    "device": torch.cuda.current_device(),
    "sum": ones.item(),
    "seeded": "model-parallel-rng" in get_cuda_rng_tracker().get_states(),
}
print("FOUND", json.dumps(found), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.multigpu
def test_two_gpus_meet_over_nccl() -> None:
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    fields = {"tp": 2, "sp": True}
    processes = [_start(GPU_SCRIPT, fields, **environment, **rank) for rank in ranks]
    wanted = {"same": True, "backend": "nccl", "sum": 2.0, "seeded": True}
    assert [_finish(p) for p in processes] == [{**wanted, "device": rank} for rank in range(2)]


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert _rank_and_world_size() == (0, 1)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(MeshError, match=r"WORLD_SIZE, MASTER_ADDR, MASTER_PORT missing"):
        ParallelDims().initialize(device="cpu")
    good = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for wrong, found in (
        ({"WORLD_SIZE": "two", "MASTER_PORT": "-1"}, "found WORLD_SIZE='two', MASTER_PORT='-1'"),
        ({"LOCAL_RANK": ""}, "found LOCAL_RANK=''"),
        ({"RANK": "2"}, "found RANK=2 and WORLD_SIZE=2"),
    ):
        for name, value in (good | wrong).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(MeshError, match=found):
            ParallelDims().initialize(device="cpu")
        monkeypatch.delenv("LOCAL_RANK", raising=False)


def _initialize_each(meshes: list[ParallelDims]) -> list[tuple[bool, list[int]]]:
    """In an existing process group: whether each mesh is read back equal, and the rank on every axis."""
    import torch.distributed as dist
    from megatron.core import parallel_state as state

    found, group = [], dist.group.WORLD
    for dims in meshes:
        dims.initialize(device="cpu")
        axes = (
            *(state.get_tensor_model_parallel_group(), state.get_pipeline_model_parallel_group()),
            *(state.get_context_parallel_group(), state.get_expert_model_parallel_group()),
            *(state.get_expert_tensor_parallel_group(), state.get_data_parallel_group()),
            state.get_expert_data_parallel_group(),
        )
        same = ParallelDims.from_mcore(sp=dims.sp) == dims and dist.group.WORLD is group
        found.append((same, [axis.rank() for axis in axes]))
        state.destroy_model_parallel()
    return found


def test_every_axis_is_initialized_in_megatrons_default_order() -> None:
    axes = {"tp": 0, "pp": 1, "cp": 2, "ep": 3, "etp": 4}
    meshes = [ParallelDims(**{name: 2}) for name in axes]
    meshes += [ParallelDims(tp=2, sp=True, etp=2), ParallelDims(pp=2, vp=2), ParallelDims(tp=2, ep=2)]
    data, experts = 5, 6
    last = [{0, experts}, {1}, {2, experts}, {3, data}, {4, data}, {0, 4}, {1}, {0, 3}]
    found = pool.run(2, _initialize_each, meshes)
    assert found[0] == [(True, [0] * 7)] * len(meshes)
    assert found[1] == [(True, [int(axis in ones) for axis in range(7)]) for ones in last]


def _initialize_levels() -> tuple[bool, list[list[int]], str, bool]:
    """Whether the mesh is read back, the ranks of both levels, another mesh's error, and whether all groups end."""
    import torch.distributed as dist
    from megatron.core import parallel_state as state

    dims = ParallelDims(cp=4, hierarchical_context_parallel_sizes=(2, 2))
    dims.initialize(device="cpu")
    same = ParallelDims.from_mcore() == dims
    ParallelDims(cp=4).initialize(device="cpu")  # a mesh without a hierarchy fits groups with one
    levels = [dist.get_process_group_ranks(group) for group in state.get_hierarchical_context_parallel_groups()]
    with pytest.raises(MeshError) as refused:
        ParallelDims(cp=4, hierarchical_context_parallel_sizes=(4, 1)).initialize(device="cpu")
    state.destroy_model_parallel()  # which leaves these groups
    other = ParallelDims(tp=2, cp=4, sp=True)
    other.initialize(device="cpu")
    gone = ParallelDims.from_mcore(sp=True) == other
    state.destroy_model_parallel()
    return same, levels, str(refused.value), gone


def test_context_parallelism_of_two_levels_has_neighbours_and_rings() -> None:
    found = pool.run(8, _initialize_levels)
    neighbours, rings = [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2], [1, 3], [4, 6], [5, 7]]
    for rank, (_, levels, _, _) in enumerate(found):
        assert levels == [next(group for group in each if rank in group) for each in (neighbours, rings)]
    assert all(same and gone for same, _, _, gone in found)
    assert all("{'hierarchical_context_parallel_sizes': ((2, 2), (4, 1))}" in message for _, _, message, _ in found)


def _read_what_a_trainer_made() -> list[ParallelDims]:
    """The groups are made by megatron-core's own call, which leaves some sizes at None."""
    from megatron.core import parallel_state

    found = []
    for sizes in ({"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}, {"context_parallel_size": 2}):
        parallel_state.initialize_model_parallel(**sizes)
        found.append(ParallelDims.from_mcore(layout="Et|tL" if "pipeline_model_parallel_size" in sizes else None))
        parallel_state.destroy_model_parallel()
    return found


def test_from_mcore_reads_what_a_trainer_initialised() -> None:
    wanted = [ParallelDims(tp=2, etp=2), ParallelDims(pp=2, layout="Et|tL"), ParallelDims(cp=2)]
    assert pool.run(2, _read_what_a_trainer_made) == [wanted, wanted]


ENDING = """
import os, sys, threading, time
import torch
import torch.distributed as dist
from mcore_bridge.config.mesh.parallel_dims import ParallelDims

begun = threading.Event()

class Busy:
    def __del__(self):
        begun.set()
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            pass

child = os.fork()
os.environ["RANK"] = "0" if child else "1"
ParallelDims().initialize(device="cpu")
store = dist.distributed_c10d._get_default_store()
tensor = torch.ones(3)
if child:
    tensor.held = Busy()  # gone with the tensor, of which a thread of gloo lets go last
    dist.all_reduce(tensor, async_op=True)
    del tensor
    store.set("let go", "")
    assert begun.wait(30)
else:
    store.wait(["let go"])
    dist.all_reduce(tensor)
"""


def test_a_process_ends_well_while_a_thread_of_gloo_is_at_work() -> None:
    """Otherwise Python ends the thread, and C++ then the process: "terminate called without an active exception"."""
    finished = _start(ENDING, {}, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    _, error = finished.communicate(timeout=120)
    assert finished.returncode == 0, error[-3000:]


@pytest.mark.parametrize(
    "seen",
    [
        [[("R", "1")], [("R", "1")], [("S", "2")], [("S", "2")]],  # it computes, and does not wait for the GIL
        [[("S", "1")], [("S", "2")], [("S", "2")]],  # its counter has grown between two reads
        [[("S", "1"), ("R", "1")], [("S", "1"), ("R", "1")], []],
    ],
    ids=["running", "woken", "one of two"],
)
def test_the_end_waits_until_two_looks_find_each_thread_of_gloo_asleep(
    seen: list[list[tuple[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter(seen)
    monkeypatch.setattr(process_groups, "_gloo_threads", lambda: next(looks))
    process_groups._let_gloo_rest()
    assert not list(looks), "it has not looked so often"


def test_a_thread_of_gloo_that_ends_before_its_state_is_read_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda *_: [Path("/proc/self/task/0/status")])  # no thread has this number
    assert process_groups._gloo_threads() == []
