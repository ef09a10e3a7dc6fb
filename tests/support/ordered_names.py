"""Orders that all ranks must share, although each rank's process has its own seed for the hashes of strings.

    PYTHONHASHSEED=1 python -m tests.support.ordered_names

DDP lays out gradients in the order of the modules, and messages of an export follow the order of the names.
"""

import json
import sys
import tempfile

import torch.distributed as dist

import mcore_bridge as mb
from tests import zoo

CASES = ("qwen3_moe", "deepseek_v3", "qwen3.5")


def orders() -> dict[str, list[str]]:
    """For each case: parameters as built, HF tensors, and parameters with each of two sets of adapters."""
    found = {}
    for name in zoo.here(CASES):
        chunks = mb.build_model(zoo.cases()[name].hf, load_weights=False, device="cpu")
        names = [own for own, _ in chunks[0].named_parameters()]
        names += [spec.name for spec in mb.manifest(chunks)]
        for number in range(2):
            mb.add_adapters(chunks, rank=2, alpha=2, targets="all-linear", name=f"set {number}")
            names += [own for own, parameter in chunks[0].named_parameters() if parameter.requires_grad]
            names += [own for own, _ in mb.iter_hf_adapters(chunks)]
        found[name] = names
    return found


def main() -> None:
    """Print the orders of a job of one rank."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        mb.ParallelDims().initialize(device="cpu")
        json.dump(orders(), sys.stdout)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
