"""Assigns tensors to the files of a checkpoint, and files to the ranks that write them, equally on every rank."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mcore_bridge.rules.spec import TensorSpec, runs_within

MAX_SHARD_BYTES = 5 << 30
MIN_SHARD_BYTES = 256 << 20
FILES_AT_ONCE = 4
"""Files to which a rank writes at once: the kernel lets only one thread at a time write to a file."""


@dataclass(frozen=True, slots=True)
class FileShard:
    """A file, the rank that writes it, and its tensors."""

    name: str
    rank: int
    tensors: tuple[TensorSpec, ...]


def assign_files(
    specs: Sequence[TensorSpec], world_size: int, max_shard_bytes: int = MAX_SHARD_BYTES
) -> tuple[FileShard, ...]:
    """Assign tensors to ranks and to files, so that all ranks write equally much, and all the time.

    Consecutive tensors go to different ranks and files. An export yields one tensor after the other; if consecutive
    tensors were in one file, only one thread would write at a time. If files would be small, there are fewer files.

    Args:
        max_shard_bytes: upper limit on the size of a file, unless one tensor is larger.
    """
    num_files = max(1, min(len(specs), sum(spec.num_bytes for spec in specs) // min(MIN_SHARD_BYTES, max_shard_bytes)))
    num_writers = min(num_files, world_size)
    at_once = min(num_files // num_writers, FILES_AT_ONCE)
    shares = _shares(specs, num_writers * at_once)
    files = [
        (share % num_writers * world_size // num_writers, part)
        for share, names in enumerate(shares)
        for part in _cut([spec for spec in specs if spec.name in names], max_shard_bytes)
    ]
    return tuple(
        FileShard(name, rank, part) for name, (rank, part) in zip(shard_names_of(len(files)), files, strict=True)
    )


def shard_names_of(count: int) -> tuple[str, ...]:
    """The names of ``count`` files of weights, numbered as in transformers."""
    return tuple(f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1))


def _shares(specs: Iterable[TensorSpec], num_writers: int) -> list[set[str]]:
    """The names for each writer: each tensor, from the largest on, goes to the writer with the fewest bytes."""
    shares: list[set[str]] = [set() for _ in range(num_writers)]
    loads = [(0, writer) for writer in range(num_writers)]
    for spec in sorted(specs, key=lambda spec: -spec.num_bytes):
        load, writer = heapq.heappop(loads)
        shares[writer].add(spec.name)
        heapq.heappush(loads, (load + spec.num_bytes, writer))
    return shares


def _cut(specs: list[TensorSpec], max_bytes: int) -> Iterator[tuple[TensorSpec, ...]]:
    """Cut tensors into runs of equal size, as few as ``max_bytes`` allows."""
    total = sum(spec.num_bytes for spec in specs)
    limit = -(-total // max(1, -(-total // max_bytes)))
    return map(tuple, runs_within(specs, lambda spec: spec.num_bytes, limit))
