"""The assignment of tensors to ranks: each tensor once, about equal bytes, no run of neighbours on one rank."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.files.file_shards import FILES_AT_ONCE, assign_files
from mcore_bridge.weights.manifest import Manifest


def manifest_of(*sizes):
    return Manifest(tuple(TensorSpec(f"t{i}", (size,), torch.uint8) for i, size in enumerate(sizes)))


def loads(shards, world_size):
    return [sum(s.num_bytes for x in shards if x.rank == rank for s in x.tensors) for rank in range(world_size)]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 9), st.integers(1, 1200))
def test_everything_is_written_once_and_evenly(sizes, world_size, max_bytes):
    specs = manifest_of(*sizes)
    shards = assign_files(specs.tensors, world_size, max_bytes)
    assert sorted(s.name for shard in shards for s in shard.tensors) == sorted(s.name for s in specs)
    assert all(shard.tensors for shard in shards)
    assert len({shard.name for shard in shards}) == len(shards)
    for shard in shards:
        assert len(shard.tensors) == 1 or sum(s.num_bytes for s in shard.tensors) <= max_bytes
    writers = [load for load in loads(shards, world_size) if load] or [0]
    assert max(writers) - min(writers) <= max(sizes)


def test_one_large_tensor_is_all_that_its_rank_writes():
    assert loads(assign_files(manifest_of(10, 10, 10, 1000, 10, 10, 10).tensors, 4, 50), 4) == [1000, 20, 20, 20]


def test_neighbours_go_to_different_ranks():
    """All write during the whole of an export, and none waits for its turn."""
    shards = assign_files(manifest_of(*[10] * 40).tensors, 4, 1000 // 25)
    rank_of = {spec.name: shard.rank for shard in shards for spec in shard.tensors}
    assert all(len({rank_of[f"t{i}"] for i in range(start, start + 4)}) == 4 for start in range(0, 40, 4))


def test_small_models_are_one_file():
    (shard,) = assign_files(manifest_of(255 << 20, 255 << 20).tensors, 8)
    assert shard.name == "model-00001-of-00001.safetensors"


def test_the_writers_of_a_medium_model_are_spread_over_the_nodes():
    shards = assign_files(manifest_of(*[256 << 20] * 4).tensors, 16)
    assert sorted(shard.rank for shard in shards) == [0, 4, 8, 12]


def test_a_rank_writes_several_files_at_once_when_they_are_large():
    """Neighbours on one rank are in different files: a kernel lets one thread at a time write to one file."""
    shards = assign_files(manifest_of(*[64 << 20] * 64).tensors, 2)
    assert [shard.rank for shard in shards].count(0) == [shard.rank for shard in shards].count(1) == FILES_AT_ONCE
    file_of = {spec.name: shard.name for shard in shards for spec in shard.tensors}
    together = 2 * FILES_AT_ONCE
    assert all(len({file_of[f"t{i}"] for i in range(at, at + together)}) == together for at in range(0, 64, together))
