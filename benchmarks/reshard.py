"""Times exports of an engine's slices to every rank, and full exports in the same run.

    torchrun --nproc-per-node 4 benchmarks/reshard.py "qwen3-8b tp=2 pp=2 to tp=4" "qwen3-8b tp=4 to tp=2"
    torchrun --nproc-per-node 4 benchmarks/reshard.py --device cpu "tiny tp=2 pp=2 to tp=4" "tiny-moe ep=4 to tp=4 ep=2"

Weights are random. Rank r gets the slices of rank r of the engine. If the engine has fewer ranks, several trainer ranks
get equal slices. ``first_s`` is the first export of a case, before any full one, as in ``export.py``; it includes the
first all-to-all of its group. ``raw_s`` is the time of ``all_to_all_single`` (of 512 MiB on GPUs) that bring to each
rank as many bytes as the fullest rank receives. ``ratio`` is ``raw_s`` divided by the median: the part of the network's
speed that was reached.
"""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist
from common import case_arguments, from_the_first, most, report, timed
from export import build, drain, leave_mesh

import mcore_bridge as mb
from mcore_bridge.weights.agreement import agree_on_plan
from mcore_bridge.weights.plan.target import Target


def main() -> None:
    """Measure each case, one after the other in one set of processes."""
    arguments = case_arguments(__doc__, "a model, its mesh, and the engine: 'qwen3-8b tp=2 pp=2 to tp=4'").parse_args()
    for case in arguments.cases:
        mesh, _, engine = case.partition(" to ")
        models = build(mesh, arguments)
        ranks = mb.engine_ranks(**{key: int(value) for key, value in (size.split("=") for size in engine.split())})
        measure(case, models, ranks[dist.get_rank() % len(ranks)], arguments.repeats, arguments.device)
        models.clear()
        leave_mesh()


def measure(case: str, models: list[torch.nn.Module], target: Target, repeats: int, device: str) -> None:
    """One report."""
    first, seconds, peak = from_the_first(lambda: drain(models, target=target), repeats)
    timed(lambda: drain(models), 2)
    full = statistics.median(timed(lambda: drain(models), repeats))
    received = most(received_bytes(models, target))
    slices = most(mb.manifest(models, target=target).num_bytes)
    median, raw = statistics.median(seconds), raw_all_to_all(received, device)
    report(
        case=case,
        slices_gb=round(slices / 1e9, 3),
        received_gb=round(received / 1e9, 3),
        first_s=round(first, 4),
        min_s=round(min(seconds), 4),
        median_s=round(median, 4),
        raw_s=round(raw, 4),
        ratio=round(raw / median, 3),
        full_export_s=round(full, 4),
        part_of_full=round(median / full, 3),
        extra_gb=round(peak / 1e9, 3),
    )


def received_bytes(models: list[torch.nn.Module], target: Target) -> int:
    """Bytes that travel to this rank."""
    program = agree_on_plan(models, None, "lm", target=target).program
    return sum(sum(program.received(message.number)) for message in program.plan.messages)


def raw_all_to_all(num_bytes: int, device: str) -> float:
    """The seconds in which every rank receives ``num_bytes`` from the other ranks."""
    world = dist.get_world_size()
    source = torch.empty(
        (512 << 20 if device == "cuda" else 8 << 20) // world * world, dtype=torch.uint8, device=device
    )
    target = torch.empty_like(source)
    rounds = 8

    def scatter() -> None:
        for work in [dist.all_to_all_single(target, source, async_op=True) for _ in range(rounds)]:
            work.wait()

    return min(timed(scatter, 4)) * num_bytes * world / (rounds * source.numel() * (world - 1))


if __name__ == "__main__":
    main()
