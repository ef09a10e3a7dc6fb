"""The text of docs/support.md: what passed on GPUs, by family and mesh, from the records in benchmarks/results."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HEAD = """# What has passed on GPUs

Made from `benchmarks/results/*_gpu.jsonl` by `docs/make_families.py`: what `pytest -m multigpu --record FILE` wrote. A
mesh stands here only if everything that its latest record tried passed, with the code of that day; `DP2` is two
replicas. Models are small and random, in sizes that kernels like or odd ones. On CPU every run of the suite holds every
family that transformers has to its logits, on TP1, TP2 SP, TP4 SP and, where it is not refused, CP2
([families.md](families.md)).

Log-probs on 4 GPUs were tried with one sequence in each pack of a pipeline. Where several ranks are said to be on each
GPU, NCCL took them for hosts of their own: the same kernels and collectives, through sockets (figures of
[one](../benchmarks/results/2026-11-23_night_1xH200.md) and of [two GPUs](../benchmarks/results/2026-11-24_2xH200.md),
Qwen3-8B on siiRL's mesh of 8 ranks among the first).
`bailing_moe` is `bailing_moe_v2` as its first files spell it. Families that need megatron-core 0.19.2 (deepseek_v32,
glm_moe_dsa) ran with it, others with 0.16.1.
"""
CHECKS = {
    "log-probs": "those of transformers: `te` in bf16 packed and in rows and packed in fp32, `torch` in bf16 packed "
    "(qwen3: `te` packed in fp16 too); and an export is what was loaded, bit for bit",
    "gradients": "in fp32, packed, the norm that megatron-core makes of them, and the loss: as on one rank that has "
    "all rows one by one (qwen3, gemma2, qwen3_moe, deepseek_v3 and gpt_oss: in rows too), on TP1 with torch's modules "
    "in place of TransformerEngine's",
    "gradients in bf16": "those of each kind of tensor are at most twice as far from fp32 as those of torch's modules "
    "on one rank are, where every expert has every token",
    "optimizer": "four steps of the distributed optimizer in bf16, overlapped (those five: also not; qwen3 and "
    "qwen3_moe: in fp16 too, also where gradients overflow at first): an export is what it holds in fp32, cast down, "
    "and the same bits while parameters, gradients or the optimizer's state, each alone and all together, are on the "
    "CPU",
    "vllm": "vLLM, started without weights and fed bucket by bucket: log-probs of what it samples and of the same as "
    "a prompt, after the first and the fifth round, and 64 greedy tokens are those of transformers; and its own "
    "weights are in the end, bit for bit, those that it reads from files; "
    "[on CPU](../benchmarks/results/2026-11-23_vllm_cpu.md) in fp32, all but minimax_m2's log-probs",
    "verl": "verl's own engine with our plug-in, through load, log-probs, a step, export, offload, save and resume",
    "exchanges": "every `cp_comm_type` in bf16, `a2a+p2p` where `HCP` says how many ranks its two levels have: "
    "log-probs and gradients are at most twice as far from fp32 as with torch's attention in bf16",
    "switches": "recompute, fusions, dispatchers and overlaps that change no gradient",
    "fp8": "computed in FP8 with parameters in bf16, in three recipes: log-probs at most 16 times and gradients at "
    "most 32 times as far from fp32 as in bf16, by their bits; and an export is what was loaded, bit for bit",
}
"""What is checked, and what that means."""


def page(folder: Path) -> str:
    """The text of the page, from all records in a folder."""
    records = [json.loads(line) for path in sorted(folder.glob("*_gpu.jsonl")) for line in path.open()]
    if unknown := {record["check"] for record in records} - CHECKS.keys():
        raise SystemExit(f"records of unknown checks {sorted(unknown)}: say in docs/support_page.py what they are")
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
