"""Times a save, and a raw write of equally many bytes in the same run.

torchrun --nproc-per-node 4 benchmarks/save.py --model qwen3-8b --tp 2 --pp 2 --folder FOLDER

The export is one without files. The raw write shows the speed of the file system. Eight threads of each rank write the
rank's share of the bytes, each to a separate file, since a kernel lets only one thread at a time write to a file. They
write from existing memory (pinned, if there is a GPU) to the file system of the save. The raw write neither exports nor
copies from a GPU, and its files have no headers. Before each measurement all files are flushed to the disk, and during
none. ``ratio`` is the speed of the save divided by the speed of the raw write.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from common import prepared, report, summary, timed, timed_afresh

import mcore_bridge as mb

PIECE, THREADS = 16 << 20, 8


def write(path: Path, piece: torch.Tensor, num_bytes: int) -> None:
    """Write ``num_bytes`` by repeating ``piece``."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    view = memoryview(piece.numpy())
    while num_bytes:
        num_bytes -= os.write(fd, view[:num_bytes])
    os.close(fd)


def raw_write(folder: Path, pieces: list[torch.Tensor], num_bytes: int, threads: ThreadPoolExecutor) -> None:
    """Write this rank's share of the bytes, to a file for each of ``pieces``."""
    paths = [folder / f"{dist.get_rank()}-{number}" for number in range(len(pieces))]
    share = -(-num_bytes // dist.get_world_size() // len(pieces))
    list(threads.map(partial(write, num_bytes=share), paths, pieces))


def main() -> None:
    """Measure all in turn, so that other load of the machine affects all."""
    arguments, dims, folder = prepared(__doc__)
    models = mb.build_model(folder, dims=dims, device=arguments.device)
    num_bytes = mb.manifest(models).num_bytes
    pieces = [torch.ones(PIECE, dtype=torch.uint8, pin_memory=arguments.device == "cuda") for _ in range(THREADS)]
    target, raw_folder = arguments.folder / "saved", arguments.folder / "raw"
    saves, raws, exports = [], [], []
    with ThreadPoolExecutor(THREADS) as threads:
        for _ in range(arguments.repeats):
            raw_folder.mkdir(exist_ok=True)
            raws += timed_afresh(lambda: raw_write(raw_folder, pieces, num_bytes, threads), raw_folder)
            exports += timed(lambda: all(True for _ in mb.iter_hf_weights(models)), 1)
            saves += timed_afresh(lambda: mb.save_hf_checkpoint(models, target), target)
    saved, raw, exported = (summary(seconds, num_bytes) for seconds in (saves, raws, exports))
    ratio = round(raw["median_s"] / saved["median_s"], 3)
    figures = {"save": saved, "export": exported, "raw": raw, "ratio": ratio}
    report(benchmark="save", model=folder.name, mesh=str(dims), gb=num_bytes / 1e9, **figures)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
