"""A checkpoint that one rank cannot write or read fails on all ranks, with the reason, and leaves nothing."""

import contextlib
import os
import re
import resource
from unittest import mock

import pytest
import torch.distributed as dist

import mcore_bridge as mb
from mcore_bridge.errors import CheckpointError
from mcore_bridge.weights.dist_checkpoint import folder as torch_dist
from mcore_bridge.weights.files import file_shards
from tests.support import pool, stepping
from tests.support.exports import built
from tests.support.failing_ranks import only_on_1
from tests.support.limits import limited

MESH = mb.ParallelDims(pp=2)


def ready():
    """This rank's chunks, in a process in which megatron-core can save."""
    return built(MESH)[0]


def refused(call, *arguments, **named):
    with pytest.raises(CheckpointError) as error:
        call(*arguments, **named)
    return str(error.value)


def save_where_files_stay_small(folder, rank):
    models = ready()
    with limited(resource.RLIMIT_FSIZE, 4096, dist.get_rank() == rank):
        return refused(mb.save_checkpoint, models, folder)


def save_what_leaves_something_out(folder, rank):
    models = ready()
    if dist.get_rank() == rank:
        models[0].decoder.layers[-1].sharded_state_dict = lambda *arguments, **named: {}
    return refused(mb.save_checkpoint, models, folder)


def save_what_cannot_be_pickled(folder, _):
    models = ready()
    return refused(mb.save_checkpoint, models, folder, common={"sampler": lambda: None})


def save_from_a_config_that_one_rank_lacks(folder, rank):
    models = ready()
    config = os.path.join(os.path.dirname(folder), "nowhere") if dist.get_rank() == rank else models[0].bridge.hf
    return refused(mb.save_hf_checkpoint, models, folder, hf=config)


def save_what_one_replica_cannot_gather(folder, rank):
    models, _ = built(mb.ParallelDims())
    wrapped = stepping.gathering_late(models)
    if dist.get_rank() == rank:
        parameter = next(models[0].parameters())
        parameter.data = parameter.data.clone()
    return refused(mb.save_checkpoint, wrapped, folder)


@pytest.mark.parametrize(
    ("save", "message"),
    [
        (save_what_one_replica_cannot_gather, "rank 1 of the group: .*moved before replicas"),
        (save_where_files_stay_small, r": rank 1 of the job: OSError: \[Errno 27\] File too large$"),
        (save_what_leaves_something_out, "rank 1 of the group: .*omits"),
        (save_what_cannot_be_pickled, "(all 2 ranks of the group|rank 0 .*rank 1 of the group): .*pickle"),
        (save_from_a_config_that_one_rank_lacks, "rank 1 of the group: .*nowhere"),
    ],
)
def test_a_save_that_one_rank_fails_in_raises_on_all(tmp_path, save, message):
    found = pool.run(2, save, str(tmp_path / "out"), 1, timeout=60)
    assert found[0] == found[1]
    assert re.search("was not changed|nothing was written", found[0])
    assert re.search(message, found[0]), found[0]
    assert "Traceback" not in found[0]
    assert os.listdir(tmp_path) == []


def saved(folder):
    models = ready()
    mb.save_checkpoint(models, folder)


def load(folder, rank):
    models, _ = built(MESH, load_weights=False)
    mine = folder if dist.get_rank() != rank else f"{folder}-of-another-node"
    return refused(mb.load_checkpoint, models, mine)


@pytest.mark.parametrize(
    ("rank", "part", "message"),
    [
        (1, None, "of-another-node"),
        (None, 1, "was not read, or in part: .*load failed. Copy"),
        (None, 2, r"was not read, or in part: .*distcp must have \d+ bytes, found \d+\. Copy the folder again"),
    ],
)
def test_a_load_that_one_rank_fails_in_raises_on_all(tmp_path, rank, part, message):
    """The rank that does not find the folder, or reads a file that holds zeros, or is cut."""
    folder = tmp_path / "out"
    pool.run(2, saved, str(folder))
    if part is not None:
        path = max(folder.glob("*.distcp"), key=lambda each: each.stat().st_size)
        path.write_bytes(bytes(path.stat().st_size // part))
    for heard in pool.run(2, load, str(folder), rank, timeout=60):
        assert re.search(message, heard), heard
        assert "Traceback" not in heard


def save_to_folders_of_their_own(folder, save):
    with mock.patch.object(file_shards, "MIN_SHARD_BYTES", 1):  # so that each rank writes
        return refused(save, ready(), f"{folder}/{dist.get_rank()}/step")


@pytest.mark.parametrize("save", [mb.save_checkpoint, mb.save_hf_checkpoint])
def test_files_that_other_ranks_wrote_elsewhere_are_missed(tmp_path, save):
    """For example, each machine has the folder on its own disk."""
    for message in pool.run(2, save_to_folders_of_their_own, str(tmp_path), save):
        assert "name a folder on a file system that all ranks share" in message
    assert not any(path.name == "step" for path in tmp_path.rglob("*"))


def load_what_another_writes(folder):
    models = ready()
    for iteration in (1, 2):
        mb.save_checkpoint(models, f"{folder}/iter_000000{iteration}")
    first = mock.patch.object(torch_dist, "latest_in", lambda folder: [folder / "iter_0000001"])
    with first if dist.get_rank() == 0 else contextlib.nullcontext():
        return refused(mb.load_checkpoint, models, folder)


def test_all_ranks_load_the_same_iteration(tmp_path):
    """A trainer may write the next checkpoint after one rank has looked and before another one does."""
    for message in pool.run(2, load_what_another_writes, str(tmp_path)):
        assert "ranks found different checkpoints" in message
        assert "['iter_0000001', 'iter_0000002']" in message


def load_where_one_cannot(folder, dims, step):
    models, _ = built(dims)
    mb.save_checkpoint(models, folder)
    with only_on_1(f"mcore_bridge.weights.dist_checkpoint.compare.Check.{step}"):
        return refused(mb.load_checkpoint, models, folder)


@pytest.mark.parametrize(
    ("dims", "step"),
    [(mb.ParallelDims(), "agree"), (mb.ParallelDims(), "compare"), (MESH, "compare")],
    ids=["replica", "replica before", "stage before"],
)
def test_a_load_of_which_one_rank_cannot_ask_raises_on_all(dims, step, tmp_path):
    """The rank is alone in a replica, or others in its replica would wait for its request."""
    for message in pool.run(2, load_where_one_cannot, str(tmp_path / "step"), dims, step, timeout=60):
        assert "rank 1 of the group: RuntimeError: out of memory" in message
