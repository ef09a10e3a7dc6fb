"""verl's own engine on real GPUs with our bridge, in bf16: the life of actors and critics on every kind of mesh.

What is asked is in ``verl_life.py``, the same as on CPU; here verl also moves all states to the CPU between its calls,
as it does to make room for rollouts. docs/trainers/verl.md says how to install it.
"""

import datetime
import importlib.util
import os
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mcore_bridge import ParallelDims
from tests.support import records
from tests.support.gpu_models import SIZES
from tests.support.gpu_models import WITH_EXPERTS as SPARSE
from tests.support.gpus import spawn, with_replicas
from tests.support.stepping import leave_mesh
from tests.support.strategies import random_state, save, tiny
from tests.support.trainer_calls import attention_switches
from tests.workers.verl_engine import SWITCH, own_processes
from tests.workers.verl_life import life, problems, with_tokenizer

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed"),
]

FAMILIES = {
    "qwen2": tiny(
        "qwen2", **{**SIZES, "hidden_size": 512}, tie_word_embeddings=True, architectures=["Qwen2ForCausalLM"]
    ),
    "qwen3": tiny("qwen3", **SIZES, architectures=["Qwen3ForCausalLM"]),
    "qwen3 of nine tokens": tiny("qwen3", **{**SIZES, "vocab_size": 9}, architectures=["Qwen3ForCausalLM"]),
    "qwen3_moe": SPARSE,
}
"""A vocabulary of nine tokens, so that one token of padding in a softmax exceeds the bound."""


@dataclass(frozen=True)
class Case:
    """A model in verl: its family, its mesh, the surface that it is built with; a critic, or with verl's kernels."""

    family: str
    dims: ParallelDims
    vanilla: bool
    value: bool = False
    fused: bool = False

    def describe(self, world_size: int) -> str:
        """Print progress for a reader of the log."""
        role, face = "critic" if self.value else "actor", "mbridge" if self.vanilla else "megatron_bridge"
        return f"{self.family}{' fused' * self.fused} {role}, {face}, {with_replicas(self.dims, world_size)}"


CASES = {
    1: [
        Case("qwen3", ParallelDims(), vanilla=True),
        Case("qwen3", ParallelDims(), vanilla=False, value=True),
        Case("qwen3_moe", ParallelDims(), vanilla=False),
    ],
    2: [
        Case("qwen2", ParallelDims(tp=2, sp=True), vanilla=False),
        Case("qwen3", ParallelDims(pp=2), vanilla=False),
        Case("qwen3", ParallelDims(cp=2), vanilla=True),
        Case("qwen3", ParallelDims(tp=2, sp=True), vanilla=True, value=True),
        Case("qwen3 of nine tokens", ParallelDims(tp=2, sp=True), vanilla=False, fused=True),
        Case("qwen3_moe", ParallelDims(ep=2), vanilla=True),
        Case("qwen3_moe", ParallelDims(tp=2, ep=2, sp=True), vanilla=False),
    ],
    4: [
        Case("qwen2", ParallelDims(tp=2, pp=2, sp=True), vanilla=True),
        Case("qwen3", ParallelDims(tp=2, pp=2, vp=2, sp=True), vanilla=False),
        Case("qwen3", ParallelDims(pp=2), vanilla=False, value=True),
        Case("qwen3_moe", ParallelDims(tp=2, ep=2, sp=True), vanilla=True),
        Case("qwen3_moe", ParallelDims(pp=2, ep=2), vanilla=False),
        Case("qwen3_moe", ParallelDims(tp=2, cp=2, ep=4, sp=True), vanilla=False),
    ],
    8: [
        Case("qwen3", ParallelDims(tp=2, pp=2, cp=2, sp=True), vanilla=True),
        Case("qwen3", ParallelDims(tp=2, pp=2, cp=2, sp=True), vanilla=False),
        Case("qwen3_moe", ParallelDims(tp=2, pp=2, ep=2, sp=True), vanilla=True),
        Case("qwen3_moe", ParallelDims(tp=2, pp=2, ep=2, sp=True), vanilla=False),
    ],
}
"""Of the meshes of 8 GPUs, verl tests an actor on the first, and an export on the last."""


def rank_main(rank, world_size, folders, out):
    """Run all cases with this many GPUs, in the order of all ranks, and return their results."""
    os.environ.update(SWITCH)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=datetime.timedelta(seconds=90))
    findings = []
    for number, case in enumerate(CASES[world_size]):
        options = {"vanilla": case.vanilla, "value": case.value, "attention": "auto", "use_fused_kernels": case.fused}
        options |= {"param_offload": True, "optimizer_offload": True}
        began = time.monotonic()
        try:
            with own_processes(), attention_switches():
                found = life(case.dims, folders[case.family], f"{out}/{number}", options)
        except Exception:
            found = traceback.format_exc()
        findings.append(found)
        if rank == 0:
            end = found.strip().splitlines()[-1] if isinstance(found, str) else f"{time.monotonic() - began:.1f} s"
            print(f"{case.describe(world_size)}: {end}", flush=True)
        leave_mesh()
    return findings


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {}
    for family, hf in FAMILIES.items():
        folder = tmp_path_factory.mktemp(hf.model_type)
        save(random_state(hf, dtype=torch.bfloat16), hf, folder)
        found[family] = with_tokenizer(folder)
    return found


@pytest.mark.parametrize("world_size", CASES)
def test_a_life_in_verl(world_size, folders, tmp_path, request):
    assert all(world_size % case.dims.smallest_world == 0 for case in CASES[world_size])
    wrong, passed = {}, []
    with tempfile.TemporaryDirectory() as out:
        findings = spawn(rank_main, tmp_path, world_size, folders, out)
        for number, (case, ranks) in enumerate(zip(CASES[world_size], zip(*findings, strict=True), strict=True)):
            print(case.describe(world_size))
            failed = [each for each in ranks if isinstance(each, str)]
            place = Path(out) / str(number)
            found = failed or problems(list(ranks), folders[case.family], place, vanilla=case.vanilla)
            print("   ", found or "right", flush=True)
            passed.append(((with_replicas(case.dims, world_size), case.family.split()[0]), not found))
            if found:
                wrong[case.describe(world_size)] = found
    records.append(request.config.getoption("--record"), "verl", world_size, passed)
    assert not wrong, "\n".join(f"{case}: {found}" for case, found in wrong.items())
