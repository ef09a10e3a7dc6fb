"""Times exports to every rank, and raw all-gathers of equally many bytes in the same run.

    torchrun --nproc-per-node 4 benchmarks/export.py "qwen3-8b tp=2 pp=2" "qwen3-30b-a3b layers=12 ep=4 tp=2 sp=1"
    torchrun --nproc-per-node 4 benchmarks/export.py --device cpu "tiny tp=2 pp=2" "tiny-moe ep=4"

    torchrun --nproc-per-node 1 benchmarks/export.py "qwen3-8b" --quantize none '{"quant_method": "fp8"}'

Weights are random. Each rank gets every HF tensor as a separate tensor, and drops it at the next one. ``first_s`` is
the first export of a case and size of buckets. It includes exchanging inventories and planning, and no compilation: the
kernel was compiled while the model was built. GB/s count all bytes that a rank has in the end, for raw all-gathers too;
a rank's own share of these bytes does not travel. ``--quantize`` exports in several formats in turn: ``to_first`` is
the time of a format divided by the time of the first one.
"""

from __future__ import annotations

import gc
import statistics
from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist
from common import case_arguments, config_of, format_of, from_the_first, parsed, report, set_up, timed

import mcore_bridge as mb
from mcore_bridge.weights.plan.target import Target
from mcore_bridge.weights.transfer.collectives import Group


def main() -> None:
    """Measure each case, one after the other in one set of processes."""
    parser = case_arguments(__doc__, "a model and its mesh: 'qwen3-8b tp=2 pp=2', layers=N for fewer")
    parser.add_argument("--bucket-mb", type=int, nargs="+", default=[0], help="0 is as the library chooses")
    parser.add_argument(
        "--quantize", nargs="+", type=format_of, default=[None], help='"none", or a quantization_config as JSON'
    )
    arguments = parser.parse_args()
    raw = 0.0
    for case in arguments.cases:
        models = build(case, arguments)
        raw = raw or best_all_gather(arguments.device)
        for bucket_mb in arguments.bucket_mb:
            first = 0.0
            for quantize in arguments.quantize:
                median = measure(case, models, bucket_mb << 20 or None, arguments.repeats, raw, quantize, first)
                first = first or median
        models.clear()
        leave_mesh()


def build(case: str, arguments: Namespace) -> list[torch.nn.Module]:
    """This rank's chunks with random weights, on the mesh of a case, whose exports find a communicator."""
    name, layers, sizes = parsed(case)
    mesh = set_up(Namespace(**sizes, device=arguments.device))
    models = mb.build_model(
        config_of(name, layers),
        dims=mesh,
        dtype=torch.bfloat16,
        device=arguments.device,
        backend=arguments.backend,
        load_weights=False,
    )
    with torch.no_grad():
        for chunk in models:
            for parameter in chunk.parameters():
                parameter.normal_(std=0.02)
    Group.of_replica(models[0].pg_collection).all_true(is_well=True)  # NCCL makes communicators at their first use
    return models


def measure(
    case: str,
    models: list[torch.nn.Module],
    bucket_bytes: int | None,
    repeats: int,
    raw: float,
    quantize: dict[str, Any] | None,
    reference: float,
) -> float:
    """One report: the first export, warm ones, and the memory that they take. Returns the median in seconds."""
    first, seconds, peak = from_the_first(lambda: drain(models, bucket_bytes, quantize=quantize), repeats)
    found = mb.manifest(models, bucket_bytes=bucket_bytes, quantize=quantize)
    median = statistics.median(seconds)
    speed = found.num_bytes / median / 1e9
    report(
        case=case,
        bucket_mb=(bucket_bytes or 0) >> 20,
        gb=round(found.num_bytes / 1e9, 3),
        tensors=len(found),
        largest_gb=round(max(spec.num_bytes for spec in found) / 1e9, 3),
        first_s=round(first, 4),
        min_s=round(min(seconds), 4),
        median_s=round(median, 4),
        gb_s=round(speed, 1),
        raw_gb_s=round(raw, 1),
        ratio=round(speed / raw, 3),
        extra_gb=round(peak / 1e9, 3),
        format=(quantize or {}).get("quant_method"),
        to_first=round(median / (reference or median), 3),
    )
    return median


def drain(
    models: list[torch.nn.Module],
    bucket_bytes: int | None = None,
    target: Target = "everything",
    quantize: dict[str, Any] | None = None,
) -> None:
    """Take every tensor, and keep none."""
    for _ in mb.iter_hf_weights(models, bucket_bytes=bucket_bytes, target=target, quantize=quantize):
        pass


def best_all_gather(device: str) -> float:
    """GB/s of a raw ``all_gather_into_tensor`` over all ranks, at its best size. All received bytes of a rank count."""
    best = 0.0
    for megabytes in (64, 128, 256, 1024, 4096) if device == "cuda" else (4, 16, 64):
        own = torch.empty((megabytes << 20) // dist.get_world_size(), dtype=torch.uint8, device=device)
        whole = torch.empty(own.numel() * dist.get_world_size(), dtype=torch.uint8, device=device)
        rounds = 5

        def gather(own: torch.Tensor = own, whole: torch.Tensor = whole, rounds: int = rounds) -> None:
            for _ in range(rounds):
                dist.all_gather_into_tensor(whole, own)

        speed = whole.numel() * rounds / min(timed(gather, 4)) / 1e9
        report(raw_all_gather_mb=megabytes, gb_s=round(speed, 1))
        best = max(best, speed)
    return best


def leave_mesh() -> None:
    """Forget the mesh, and give back memory."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
