"""Times a load, and a raw read of its files in the same run.

torchrun --nproc-per-node 4 benchmarks/load.py --model qwen3-8b --tp 2 --pp 2 --folder FOLDER

The raw read shows the speed of the host's memory: all ranks together read the bytes of the files once from the page
cache, and each rank gets some pieces. Eight threads of a rank read its pieces into pinned memory and copy them to the
GPU, if there is one. A thread reads one piece while the piece before is copied. The bytes are not used. A load reads
more bytes if ranks hold equal tensors, and it also reads names and headers. ``ratio`` is the speed of the load divided
by the speed of the raw read.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from common import prepared, report, summary, timed

import mcore_bridge as mb

PIECE, THREADS = 16 << 20, 8


class Reader:
    """The memory of a thread: two slots, of which one may be copied to the GPU while the other is filled."""

    def __init__(self, device: str) -> None:
        self._stream = torch.cuda.Stream() if device == "cuda" else None
        self._slots = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=device == "cuda") for _ in range(2)]
        self._crossed = [torch.cuda.Event() for _ in self._slots] if self._stream else []
        self._landed = torch.empty(PIECE, dtype=torch.uint8, device=device)

    def read(self, pieces: Iterator[tuple[int, int, int]]) -> None:
        """Each piece: file descriptor, first byte, number of bytes. Other threads take from the same ``pieces``."""
        for number, (fd, start, size) in enumerate(pieces):
            slot = self._slots[number % 2][:size]
            if self._stream:
                self._crossed[number % 2].synchronize()
            left = memoryview(slot.numpy())
            while left:
                left = left[os.preadv(fd, [left], start + size - len(left)) :]
            if self._stream:
                with torch.cuda.stream(self._stream):  # a new thread does not use this rank's GPU by default
                    self._landed[:size].copy_(slot, non_blocking=True)
                    self._crossed[number % 2].record()


def raw_read(files: list[Path], readers: list[Reader], threads: ThreadPoolExecutor) -> None:
    """This rank's pieces of all ``files``."""
    with ExitStack() as stack:
        opened = [stack.enter_context(path.open("rb", buffering=0)) for path in files]
        pieces = [
            (file.fileno(), start, min(PIECE, path.stat().st_size - start))
            for file, path in zip(opened, files, strict=True)
            for start in range(0, path.stat().st_size, PIECE)
        ]
        mine = iter(pieces[dist.get_rank() :: dist.get_world_size()])
        list(threads.map(Reader.read, readers, [mine] * len(readers)))


def main() -> None:
    """Measure both in turn, so that other load of the machine affects both."""
    arguments, dims, folder = prepared(__doc__)
    files = sorted(folder.glob("*.safetensors"))
    num_bytes = sum(path.stat().st_size for path in files)
    models = mb.build_model(folder, dims=dims, device=arguments.device)  # this also warms the page cache
    readers = [Reader(arguments.device) for _ in range(THREADS)]
    loads, raws = [], []
    with ThreadPoolExecutor(THREADS) as threads:
        raw_read(files, readers, threads)
        for _ in range(arguments.repeats):
            raws += timed(lambda: raw_read(files, readers, threads), 1)
            loads += timed(lambda: mb.load_hf_weights(models, folder), 1)
    loaded, raw = summary(loads, num_bytes), summary(raws, num_bytes)
    ratio = round(raw["median_s"] / loaded["median_s"], 3)
    report(benchmark="load", model=folder.name, mesh=str(dims), gb=num_bytes / 1e9, load=loaded, raw=raw, ratio=ratio)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
