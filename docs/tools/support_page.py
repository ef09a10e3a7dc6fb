"""The text of support.md: what passed on GPUs, by family and mesh, from the records in benchmarks/results."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HEAD = """# What has passed on GPUs

`docs/tools/make_families.py` makes this page from `benchmarks/results/*_gpu.jsonl`, which `pytest -m multigpu --record
FILE` writes. A mesh is listed only if its latest record passed completely, with the code of that day. `DP2` means two
replicas. Models are small and random, in sizes that suit kernels or odd ones. On CPU, every run of the suite compares
logits of every family with transformers, on TP1, TP2 SP, TP4 SP and, if it is not refused, CP2
([families.md](families.md)).

Log-probs on 4 GPUs were tried with one sequence in each pack of a pipeline. If several ranks were on each GPU, NCCL
treated them as different hosts: kernels and collectives did not change, but data went through sockets. There are
figures of [one GPU](../../benchmarks/results/2026-11-23_night_1xH200.md), with Qwen3-8B on siiRL's mesh of 8 ranks, and
of [two GPUs](../../benchmarks/results/2026-11-24_2xH200.md). `bailing_moe` is the name of `bailing_moe_v2` in its first
files. Families that need megatron-core 0.19.2 (deepseek_v32, glm_moe_dsa) ran with it, others with 0.16.1; since
2026-11-30 all run with 0.19.2.
"""
CHECKS = {
    "log-probs": "they equal transformers' log-probs. `te` runs in bf16 packed and in rows, and in fp32 packed; "
    "`torch` runs in bf16 packed (qwen3: `te` packed in fp16 too). An export equals the loaded weights, bit for bit",
    "gradients": "the gradient norm of megatron-core and the loss, packed in fp32, equal the results of one rank that "
    "runs all rows one by one. Five families (qwen3, gemma2, qwen3_moe, deepseek_v3 and gpt_oss) also run in rows. On "
    "TP1 torch's modules replace TransformerEngine's",
    "gradients in bf16": "every expert has every token. The errors, for each kind of tensor, are at most twice the "
    "errors of torch's modules on one rank",
    "optimizer": "four steps of the distributed optimizer in bf16, overlapped. The five families above also run "
    "without overlap; qwen3 and qwen3_moe run in fp16 too, also if gradients overflow at first. An export "
    "equals the optimizer's fp32 weights, cast down. Its bits do not change while parameters, gradients or the "
    "optimizer's state are on the CPU, each alone or all together",
    "vllm": "vLLM is started without weights and fed bucket by bucket. After the first and the fifth round, its "
    "log-probs of sampled tokens and of a prompt, and 64 greedy tokens, equal transformers'. At the end vLLM's "
    "weights equal, bit for bit, the weights that vLLM reads from files. This also holds "
    "[on CPU](../../benchmarks/results/2026-11-23_vllm_cpu.md) in fp32, except for minimax_m2's log-probs",
    "verl": "verl's own engine with our plug-in, through load, log-probs, a step, export, offload, save and resume",
    "exchanges": "every `cp_comm_type` in bf16; `HCP` gives the two levels of `a2a+p2p`. Errors of log-probs and "
    "gradients are at most twice the errors of torch's attention in bf16",
    "switches": "recompute, fusions, dispatchers and overlaps change no gradient",
    "fp8": "three recipes compute in FP8 with parameters in bf16. As the bits of the formats suggest, errors of "
    "log-probs are at most 16 times the errors in bf16, and errors of gradients at most 32 times. An export equals the "
    "loaded weights, bit for bit",
}
"""The checks, with their meaning."""


def page(folder: Path) -> str:
    """The text of the page, from all records in a folder."""
    records = [json.loads(line) for path in sorted(folder.glob("*_gpu.jsonl")) for line in path.open()]
    if unknown := {record["check"] for record in records} - CHECKS.keys():
        raise SystemExit(f"records of unknown checks {sorted(unknown)}: say in support_page.py what they are")
    lines = [HEAD]
    lines += [f"- **{check}** ({_days(records, check)}): {meaning}." for check, meaning in CHECKS.items()] + [""]
    lines += [f"| family | {' | '.join(CHECKS)} |", f"|---|{'---|' * len(CHECKS)}"]
    for family in sorted({record["family"] for record in records}):
        cells = [_meshes([r for r in records if (r["family"], r["check"]) == (family, check)]) for check in CHECKS]
        lines.append(f"| `{family}` | {' | '.join(cells)} |")
    lines += ["", "With:", "", *sorted({f"- {_said(record)}" for record in records}), ""]
    return "\n".join(lines)


def _days(records: Iterable[dict[str, Any]], check: str) -> str:
    """When a check ran."""
    days = sorted(record["date"] for record in records if record["check"] == check)
    if not days:
        return "not run yet"
    return days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"


def _meshes(records: Iterable[dict[str, Any]]) -> str:
    """The meshes on which the latest records say that all passed."""
    latest: dict[str, dict[str, Any]] = {}
    for record in records:
        mesh = record["mesh"]
        if mesh not in latest or record["date"] >= latest[mesh]["date"]:
            latest[mesh] = record
    return ", ".join(mesh for mesh, record in latest.items() if record["passed"])


def _said(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    shared = f" with {record['ranks_per_gpu']} ranks on each" if "ranks_per_gpu" in record else ""
    return f"{record['date']}: {record['gpus']} {record['device']}{shared}, Python {record['python']}, {versions}"
