"""Seconds and memory of ``mcore-bridge convert``: ``python benchmarks/convert.py FOLDER [--layers 2] [--experts 256]``.

DeepSeek-V3 at full width with few layers, as sparse files of zeros, is converted to a checkpoint of megatron-core and
back. With ``--files "--tp 2 --ep 4"`` it is converted to Megatron's older files of that mesh and back. Each conversion
runs in a separate process, whose largest resident size is shown. The folder needs room for one result: written zeros
are made holes of files again. To prove that the memory is enough, run it with a limit, as in

    systemd-run --scope -p MemoryMax=8G -p MemorySwapMax=0 python benchmarks/convert.py FOLDER
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from benchmarks.plan import DEEPSEEK
from mcore_bridge.convert.assemble import specs_of
from mcore_bridge.convert.reference_model import whole_model
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.files.file_shards import MAX_SHARD_BYTES
from mcore_bridge.weights.files.hf_folder import INDEX
from mcore_bridge.weights.files.safetensors import SafetensorsWriter


def write_zeros(folder: Path, specs: Iterable[TensorSpec]) -> int:
    """Write the tensors as sparse files, and return their bytes."""
    index, total = {}, 0
    for number, part in enumerate(_parts(specs)):
        name = f"model-{number:05}.safetensors"
        with SafetensorsWriter(folder / name, part) as writer:
            largest = max(part, key=lambda spec: spec.num_bytes)
            writer.write(largest.name, largest.num_bytes - 1, torch.zeros(1, dtype=torch.uint8))
        size = sum(spec.num_bytes for spec in part)
        with (folder / name).open("r+b") as file:
            length = int.from_bytes(file.read(8), "little")
            file.truncate(8 + length + size)
        index.update({spec.name: name for spec in part})
        total += size
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}))
    return total


def _parts(specs: Iterable[TensorSpec]) -> Iterator[list[TensorSpec]]:
    part: list[TensorSpec] = []
    for spec in specs:
        if part and sum(each.num_bytes for each in part) + spec.num_bytes > MAX_SHARD_BYTES:
            yield part
            part = []
        part.append(spec)
    yield part


def measure(source: Path, target: Path, *options: str) -> str:
    """Run one conversion in a separate process."""
    arguments = ["convert", str(source), str(target), *options]
    script = f"""
import subprocess, resource, sys
subprocess.run([sys.executable, "-W", "ignore", "-m", "mcore_bridge.cli", *{arguments!r}], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
    start = time.monotonic()
    found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    return f"{time.monotonic() - start:.0f} s, {int(found.split()[-1]) * 1024 / 1e9:.2f} GB resident at most"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--files", metavar="MESH", help="of Megatron's older files, as options of convert")
    given = parser.parse_args()
    source, megatron, back = (given.folder / name for name in ("hf", "megatron", "back"))
    options = ["--to", "torch", *given.files.split()] if given.files else []
    source.mkdir(parents=True)
    cut = {"num_hidden_layers": given.layers, "n_routed_experts": given.experts, "first_k_dense_replace": 1}
    (source / "config.json").write_text(json.dumps(DEEPSEEK | cut))
    total = write_zeros(source, specs_of(whole_model(source, dtype=torch.bfloat16).entries))
    print(
        f"{total / 1e9:.1f} GB; HF to {given.files or 'torch_dist'}: {measure(source, megatron, *options)}", flush=True
    )
    for path in (each for each in megatron.rglob("*") if each.is_file()):
        subprocess.run(["fallocate", "--dig-holes", path], check=True)
    print(f"and back: {measure(megatron, back)}")
    shutil.rmtree(given.folder)


if __name__ == "__main__":
    main()
