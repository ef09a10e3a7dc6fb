"""Measures the memory of one training step on one GPU, and compares it with the estimate of ``plan --gpus``.

    python benchmarks/memory.py "qwen3-8b layers=4" "qwen3-30b-a3b layers=2" "moonlight layers=2" --lengths 4096 8192

The model is wrapped in megatron-core's DDP with gradients in fp32, and has its distributed optimizer. The first step
makes the optimizer's state; the second one is measured. ``ratio`` is the estimate as a part of what torch allocated at
most. The tensors that the decoder, and the modules after it, keep for the backward pass are reported beside their
estimate.
"""

from __future__ import annotations

import gc
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import config_of, parsed, report, set_up
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

import mcore_bridge as mb
from mcore_bridge.commands.options import Batch
from mcore_bridge.commands.plan.mesh_plan import build_stages
from mcore_bridge.commands.plan.tables import blueprint_of
from mcore_bridge.commands.plan.training_memory import TrainingMemory, rank_sizes, training_memory
from mcore_bridge.weights.provenance import provenance_of


def main() -> None:
    """Each case at each length."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="+", help="a model: 'qwen3-8b', layers=N for fewer")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192], help="tokens of the one sequence")
    parser.add_argument("--recompute", action="store_true", help="keep only the input of each layer")
    arguments = parser.parse_args()
    batches = [Batch(tokens, 1, arguments.recompute) for tokens in arguments.lengths]
    with tempfile.TemporaryDirectory() as root:
        folders = {case: Path(root, str(number)) for number, case in enumerate(arguments.cases)}
        for case, folder in folders.items():
            name, layers, _ = parsed(case)
            config_of(name, layers).save_pretrained(folder)
        # A plan makes its own process groups, so all plans are made before the groups of the measurement.
        expected = {case: [estimated(folder, batch) for batch in batches] for case, folder in folders.items()}
        dims = set_up(Namespace(**parsed(arguments.cases[0])[2], device="cuda"))
        for case, folder in folders.items():
            for batch, estimate in zip(batches, expected[case], strict=True):
                measure(case, folder, dims, batch, estimate)
                gc.collect()
                torch.cuda.empty_cache()
    dist.destroy_process_group()


def measure(case: str, folder: Path, dims: mb.ParallelDims, batch: Batch, expected: TrainingMemory) -> None:
    """One report."""
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    gc.collect()
    before = torch.cuda.memory_allocated()
    (model,) = mb.build_model(
        folder, dims=dims, device="cuda", load_weights=False, overrides=full if batch.recompute else {}
    )
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    wrapped = DistributedDataParallel(model.config, settings, model)
    optimizer = get_megatron_optimizer(OptimizerConfig(bf16=True, lr=1e-6, use_distributed_optimizer=True), [wrapped])
    marks: dict[str, int] = {}
    model.decoder.register_forward_hook(lambda *_: marks.update(decoder=torch.cuda.memory_allocated()))
    ids = torch.randint(0, 1000, (1, batch.sequence), device="cuda")
    places = torch.arange(batch.sequence, device="cuda")[None]
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        wrapped.zero_grad_buffer()
        marks["start"] = torch.cuda.memory_allocated()
        loss = wrapped(ids, places, None, labels=ids).float().mean()
        marks["forward"] = torch.cuda.memory_allocated()
        loss.backward()
        marks["backward"] = torch.cuda.max_memory_allocated()
        optimizer.step()
        optimizer.zero_grad()
    peak = torch.cuda.max_memory_allocated() - before
    report(
        case=case,
        tokens=batch.sequence,
        recompute=batch.recompute,
        peak_gb=_gb(peak),
        estimate_gb=_gb(expected.total),
        ratio=round(expected.total / peak, 3),
        held_gb=_gb(marks["start"] - before),
        held_estimate_gb=_gb(expected.parameters + expected.gradients + expected.optimizer),
        layers_gb=_gb(marks["decoder"] - marks["start"]),
        layers_estimate_gb=_gb(expected.activations),
        rest_gb=_gb(marks["forward"] - marks["decoder"]),
        backward_peak_gb=_gb(marks["backward"] - marks["start"]),
        rest_estimate_gb=_gb(expected.logits),
        loss=round(float(loss), 3),
    )
    wrapped.__dict__.clear()  # hooks of autograd hold it, in a cycle that no collector sees, and it holds the buffers


def estimated(folder: Path, batch: Batch) -> TrainingMemory:
    """The estimate of the command."""
    blueprint = blueprint_of(provenance_of(folder), mb.ParallelDims(), dtype=torch.bfloat16)
    return training_memory(blueprint, rank_sizes(blueprint, build_stages(blueprint)[0]), world_size=1, batch=batch)


def _gb(num_bytes: int) -> Any:
    return round(num_bytes / 1e9, 3)


if __name__ == "__main__":
    main()
