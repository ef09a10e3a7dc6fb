"""Measures one library for one case. ``peers.py`` starts it by torchrun, with the path of the library."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import MemoryPeak, checkpoint_of, config_of, parsed, report, summary, timed, timed_afresh
from libraries import LIBRARIES, Library, Pairs
from megatron.core import parallel_state
from peers import FAILED
from safetensors import safe_open


def main() -> None:
    """Print the error of a process before it ends, since the other processes of the group are ended, too."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=tuple(LIBRARIES))
    parser.add_argument("case")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--measure", required=True, help="load=2,export=5: what, and how often")
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    arguments = parser.parse_args()
    try:
        run(arguments)
    except BaseException:
        print(FAILED + json.dumps(traceback.format_exc()) + "\n", end="", flush=True)  # at once: ranks share stdout
        sys.stderr.flush()
        os._exit(1)  # without destructors, since objects may be in use


@torch.no_grad()
def run(arguments: Namespace) -> None:
    """Print a report for each measurement."""
    name, layers, sizes = parsed(arguments.case)
    join(sizes, arguments.device)
    config = config_of(name, layers)
    folder = checkpoint_of(config, arguments.folder / f"{name}-{config.num_hidden_layers}")
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    distribution, build = LIBRARIES[arguments.library]
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:  # a checkout of ours
        version = "checkout"
    library = build(folder, sizes, arguments.device)
    repeats = {what: int(number) for what, number in (part.split("=") for part in arguments.measure.split(","))}

    def publish(what: str, seconds: list[float], **more: Any) -> None:
        which = {"library": arguments.library, "version": version, "case": arguments.case, "measure": what}
        report(**which, gb=round(num_bytes / 1e9, 3), **more, **summary(seconds, num_bytes))

    first = timed(library.load, 1)
    seconds = timed(library.load, repeats.get("load", 0))
    if seconds:
        publish("load", seconds, first_s=round(first[0], 4))
    if "export" in repeats:
        for call, export in library.exports().items():
            publish("export", **measured_export(export, folder, repeats["export"]), call=call)
    if "save" in repeats:
        publish("save", measured_save(library, arguments.folder / "saved", repeats["save"]))
    dist.destroy_process_group()


def join(sizes: dict[str, int], device: str) -> None:
    """The processes of torchrun as the mesh of a case, in megatron-core's default order."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes["tp"],
        pipeline_model_parallel_size=sizes["pp"],
        virtual_pipeline_model_parallel_size=sizes["vp"] if sizes["vp"] > 1 else None,
        context_parallel_size=sizes["cp"],
        expert_model_parallel_size=sizes["ep"],
        expert_tensor_parallel_size=sizes["etp"],
    )
    if device == "cuda":
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(0)


def measured_export(export: Callable[[], Pairs], folder: Path, repeats: int) -> dict[str, Any]:
    """Fields of the report: each rank takes every tensor, and drops it at the next one."""

    def drain() -> None:
        for _ in export():
            pass

    (first,) = timed(drain, 1)
    found = compared(export(), folder)
    memory = MemoryPeak()
    timed(drain, 1)
    extra = memory.peak()
    return {
        "seconds": timed(drain, repeats),
        "first_s": round(first, 4),
        **found,
        "extra_gb": round(extra / 1e9, 3),
    }


def compared(pairs: Pairs, folder: Path) -> dict[str, Any]:
    """The number of tensors, and whether they equal the checkpoint bit for bit. The ranks share the comparison."""
    weight_map: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    wrong: list[str] = []
    names = set()
    with ExitStack() as stack:
        files = {name: stack.enter_context(safe_open(folder / name, "pt")) for name in sorted(set(weight_map.values()))}
        for number, (name, tensor) in enumerate(pairs):
            names.add(name)
            if name in weight_map and number % dist.get_world_size() == dist.get_rank():
                expected = files[weight_map[name]].get_tensor(name).to(tensor.device)
                wrong += [] if torch.equal(tensor, expected) else [name]
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, wrong)
    wrong = [*itertools.chain(*everywhere), *(names ^ weight_map.keys())]
    return {"tensors": len(names), "exact": not wrong, **({"wrong": f"{len(wrong)}, as {wrong[0]}"} if wrong else {})}


def measured_save(library: Library, target: Path, repeats: int) -> list[float]:
    """Seconds of each save, the first among them."""
    return [second for _ in range(repeats) for second in timed_afresh(lambda: library.save(target), target)]


if __name__ == "__main__":
    main()
