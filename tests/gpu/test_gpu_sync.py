"""Rounds into engines in GPU memory that begin like the last round, or in which all ranks write to all engines."""

import multiprocessing

import pytest
import torch

import mcore_bridge as mb
from tests.support.gpus import spawn
from tests.support.sync_trainer import CHANGES, PLAIN, PP2, TP1, TP2, by_all, engines, repeated

pytestmark = pytest.mark.multigpu

MESHES = {2: mb.ParallelDims(tp=2), 4: mb.ParallelDims(pp=2, ep=2)}


def started(function, arguments):
    """New processes: the pool's are forked from this one, and CUDA does not work behind a fork."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=function, args=each, daemon=True) for each in arguments]
    for process in processes:
        process.start()
    return processes


def sent(rank, world_size, addresses, kinds, transport):
    """See ``by_all``."""
    return by_all(addresses, MESHES[world_size], kinds, transport, "cuda")


@pytest.mark.parametrize("transport", ["shards", "pull"])
@pytest.mark.parametrize("world_size", MESHES)
def test_weights_go_from_all_ranks_into_all_engines_until_a_link_is_missing(world_size, transport, tmp_path):
    kinds = [TP2, PP2, TP1]
    gpus = torch.cuda.device_count()
    options = [{"shared": True, **PLAIN, "device": f"cuda:{number % gpus}"} for number in range(len(kinds))]
    addresses, _ = engines(str(tmp_path), *zip(kinds, options, strict=True), started=started)
    found = spawn(sent, tmp_path, world_size, addresses, kinds, transport)
    for rank, rounds in enumerate(found):
        assert [each[:2] for each in rounds] == [(True, False)] * 6 + [(True, True)] * 2
        copies = [(0, 1), (0, 1), (1, 0), (1, int(rank == world_size - 1))]
        assert [own for *_, (own, *_) in rounds[:4]] == (copies if transport == "shards" else [(0, 0)] * 4)


def alone(rank, world_size, workers, transport):
    """See ``repeated``."""
    return repeated(workers, transport, "cuda")


@pytest.mark.parametrize("transport", ["shards", "pull"])
def test_a_round_begins_like_the_last_one_and_is_right_whatever_has_moved(transport, tmp_path):
    (workers,), _ = engines(str(tmp_path), (TP1, {"shared": True, "device": "cuda:0"}), started=started)
    assert spawn(alone, tmp_path, 1, workers, transport) == [[(True, repeats) for _, repeats in CHANGES.values()]]
