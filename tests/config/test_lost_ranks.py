"""If a rank is killed, the other ranks report its number at once, in any operation."""

import datetime
import inspect
import os
import re
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import mcore_bridge as mb
from mcore_bridge.config.mesh import lost_ranks
from mcore_bridge.errors import CheckpointError, ExportError
from mcore_bridge.machine import start_time, this_machine
from mcore_bridge.weights.transfer import collectives
from tests.support import pool
from tests.support.exports import built
from tests.support.strategies import tiny

DIMS = mb.ParallelDims(tp=3)


def export(models, _):
    mb.to_hf_state_dict(models)


def save(models, folder):
    mb.save_hf_checkpoint(models, os.path.join(folder, "out"))


def forward(models, _):
    mb.forward(models, torch.ones(1, 4, dtype=torch.int64))


CALLS = {export: ExportError, save: CheckpointError, forward: ExportError}


def survive(rank, folder, machines, seconds):
    """Rank 1 is killed when all ranks have begun. The other ranks write the outcome of each call to a file."""
    mock.patch.multiple(lost_ranks, this_machine=lambda: machines[rank], _SECONDS=seconds).start()
    world = dist.FileStore(os.path.join(folder, "store"), 3)
    timeout = datetime.timedelta(seconds=90)
    dist.init_process_group("gloo", store=world, rank=rank, world_size=3, timeout=timeout)
    models, _ = built(DIMS, tiny("qwen3", num_attention_heads=6, num_key_value_heads=3, intermediate_size=96))
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for call, kind in CALLS.items():
        with pytest.raises(kind) as raised:
            call(models, folder)
        with Path(folder, str(rank)).open("a") as file:
            file.write(f"{raised.value}\n")
    ended = time.monotonic() + 90
    while len(written(folder)) < 2 * len(CALLS) and time.monotonic() < ended:  # otherwise it would be named, too
        time.sleep(0.05)


def written(folder):
    """The lines that the surviving ranks have written until now."""
    paths = [path for path in (Path(folder, "0"), Path(folder, "2")) if path.exists()]
    return [line for path in paths for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("machines", "seconds", "words"),
    [("aab", 30.0, r"these ranks of the job have ended: 1 \(process {pid} on "), ("abc", 0.1, "Its number is unknown")],
    ids=["one sees it and tells", "nobody sees it"],
)
def test_survivors_say_who_was_lost_as_far_as_they_can_know(tmp_path, machines, seconds, words):
    processes = pool.started(survive, [(rank, str(tmp_path), machines, seconds) for rank in range(3)])
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL, 0]
    found = written(tmp_path)
    assert len(found) == 2 * len(CALLS)
    assert all(re.search(words.format(pid=processes[1].pid), line) for line in found), found


def unanswered():
    """Runs in a worker: what survivors say when the store of the job has ended, too, as with rank 0."""
    with mock.patch.object(lost_ranks, "_Notes", side_effect=dist.DistNetworkError("gone")):
        return lost_ranks._who()


def test_a_store_that_does_not_answer_is_named():
    (found,) = pool.run(1, unanswered)
    assert "the store of the job does not answer, so rank 0 or the launcher" in found


def noted():
    """Runs in each worker: the recorded processes of the job, and the process of this rank."""
    lost_ranks.note_process()
    lost_ranks.note_process()
    dist.barrier()
    return lost_ranks._Notes().of(this_machine()), f"{dist.get_rank()} {os.getpid()} {start_time(os.getpid())}"


def test_each_process_writes_once_that_it_is_there():
    found = pool.run(2, noted)
    assert all(sorted(notes) == [own for _, own in found] for notes, _ in found)


def test_what_breaks_elsewhere_is_left_as_it_is():
    problem = RuntimeError("Connection refused by a reward server")
    with pytest.raises(RuntimeError) as raised, lost_ranks.naming_lost_ranks("forward"):
        raise problem
    assert raised.value is problem


def test_every_collective_of_a_group_names_lost_ranks():
    """Each method that calls torch.distributed has the decorator that names lost ranks."""
    methods = {name: method for name, method in vars(collectives.Group).items() if inspect.isfunction(method)}
    calling = {
        name
        for name, method in methods.items()
        if re.search(r"\bdist\.(all_|broad|scat)|\b_all_gather\(", inspect.getsource(method))
    }
    assert {"gather", "broadcast", "_gathered"} <= calling
    assert not [name for name in calling if not hasattr(methods[name], "__wrapped__")]
