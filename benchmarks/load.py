"""How long a load takes, against a raw read of the same files in the same run.

torchrun --nproc-per-node 4 benchmarks/load.py --model qwen3-8b --tp 2 --pp 2 --folder FOLDER

The raw read: all ranks together read the bytes of the files once from the page cache, each its share, a piece at a time
into one buffer (pinned, and from there to the GPU, where there is one).
"""

from pathlib import Path

import torch
import torch.distributed as dist
from common import prepared, report, summary, timed

import mcore_bridge as mb

PIECE = 64 << 20


def raw_read(files: list[Path], device: str) -> None:
    """This rank's share of all ``files``."""
    staged = torch.empty(PIECE, dtype=torch.uint8, pin_memory=device == "cuda")
    landed = torch.empty(PIECE, dtype=torch.uint8, device=device)
    view = memoryview(staged.numpy())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for path in files:
        size = path.stat().st_size
        start, stop = size * rank // world_size, size * (rank + 1) // world_size
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while start < stop:
                read = file.readinto(view[: min(PIECE, stop - start)])
                if device == "cuda":
                    landed[:read].copy_(staged[:read])
                start += read


def main() -> None:
    """Both in turn, so that what else the machine does hits both."""
    arguments, dims, folder = prepared(__doc__)
    files = sorted(folder.glob("*.safetensors"))
    num_bytes = sum(path.stat().st_size for path in files)
    models = mb.build_model(folder, dims=dims, device=arguments.device)  # which also warms the page cache
    raw_read(files, arguments.device)
    loads, raws = [], []
    for _ in range(arguments.repeats):
        raws += timed(lambda: raw_read(files, arguments.device), 1)
        loads += timed(lambda: mb.load_hf_weights(models, folder), 1)
    loaded, raw = summary(loads, num_bytes), summary(raws, num_bytes)
    ratio = round(loaded["median_s"] / raw["median_s"], 2)
    report(benchmark="load", model=folder.name, mesh=str(dims), gb=num_bytes / 1e9, load=loaded, raw=raw, ratio=ratio)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
