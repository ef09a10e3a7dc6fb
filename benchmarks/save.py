"""How long a save takes, against a raw write of the same bytes in the same run.

torchrun --nproc-per-node 4 benchmarks/save.py --model qwen3-8b --tp 2 --pp 2 --folder FOLDER

The export is one without files. One plan is kept of a model, and a save has a plan of its own, so both make theirs each
time. The raw write: all ranks at once write their share of the bytes to a file each on the same file system, from one
buffer that begins on a page. Before each measurement all is flushed to the disk, and during none.
"""

import mmap
import os
from pathlib import Path

import torch.distributed as dist
from common import prepared, report, summary, timed, timed_afresh

import mcore_bridge as mb

PIECE = 64 << 20


def raw_write(path: Path, num_bytes: int, buffer: mmap.mmap) -> None:
    """``num_bytes`` of whatever ``buffer`` holds."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    with memoryview(buffer) as view:
        while num_bytes:
            num_bytes -= os.write(fd, view[: min(PIECE, num_bytes)])
    os.close(fd)


def main() -> None:
    """Both in turn, so that what else the machine does hits both."""
    arguments, dims, folder = prepared(__doc__)
    models = mb.build_model(folder, dims=dims, device=arguments.device)
    num_bytes = mb.manifest(models).num_bytes
    buffer = mmap.mmap(-1, PIECE)
    buffer.write(b"\1" * PIECE)
    target, raw_folder = arguments.folder / "saved", arguments.folder / "raw"
    share = -(-num_bytes // dist.get_world_size())
    saves, raws, exports = [], [], []
    for _ in range(arguments.repeats):
        raw_folder.mkdir(exist_ok=True)
        raws += timed_afresh(lambda: raw_write(raw_folder / str(dist.get_rank()), share, buffer), raw_folder)
        exports += timed(lambda: all(True for _ in mb.iter_hf_weights(models)), 1)
        saves += timed_afresh(lambda: mb.save_hf_checkpoint(models, target), target)
    saved, raw, exported = (summary(seconds, num_bytes) for seconds in (saves, raws, exports))
    ratio = round(saved["median_s"] / raw["median_s"], 2)
    figures = {"save": saved, "export": exported, "raw": raw, "ratio": ratio}
    report(benchmark="save", model=folder.name, mesh=str(dims), gb=num_bytes / 1e9, **figures)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
