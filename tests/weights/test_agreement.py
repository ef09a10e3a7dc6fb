"""Reused plans: calls that differ in any argument follow each other, and each yields what a first call would yield."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import cycle, islice

import pytest
import torch
import torch.distributed as dist

import mcore_bridge as mb
from mcore_bridge import EngineRank, ParallelDims
from mcore_bridge.errors import (
    BatchError,
    BridgeError,
    CheckpointError,
    ConfigError,
    ExportError,
    MappingError,
    TransferError,
)
from mcore_bridge.factory.add_adapters import add_adapters
from mcore_bridge.weights import agreement
from mcore_bridge.weights.agreement import agree_on_plan, open_export
from mcore_bridge.weights.manifest import digest
from mcore_bridge.weights.peft.hf_adapters import iter_peft_adapters
from mcore_bridge.weights.transfer.executor import run_program
from tests.support import pool, stepping
from tests.support.exports import assert_exact
from tests.support.strategies import random_state, tiny

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
HF = tiny("qwen3_moe", num_hidden_layers=2, vocab_size=97, num_key_value_heads=2, **EXPERTS)
DIMS = ParallelDims(tp=2, ep=2, sp=True)


def calls():
    """The targets of this rank in several exports."""
    rank = dist.get_rank()
    return [
        {},
        {"bucket_bytes": 1 << 14},
        {"bucket_bytes": 1 << 14, "expert_format": "fused"},
        {"target": EngineRank(tp=2, tp_rank=rank)},
        {"target": EngineRank(tp=2, tp_rank=1 - rank)},
        {"target": "everything" if rank else "nothing"},
    ]


def described(models, options):
    """The plan of a call, and the tensors that it yields."""
    export = open_export(models, None, "lm", **options)
    plan = export.program.plan
    found = [(name, digest(tensor)) for name, tensor in run_program(export.program, export.group, export.held)]
    return [(message.widths, message.done) for message in plan.messages], found


def in_a_row():
    """Runs in each worker."""
    DIMS.initialize(device="cpu")
    models = mb.build_model(HF, dims=DIMS, dtype=torch.float32, device="cpu", load_weights=random_state(HF))
    asked, fresh = calls(), []
    for options in asked:
        agreement._plans.clear()
        fresh.append(described(models, options))
    assert len({repr(plan) for plan, _ in fresh}) > 3
    agreement._plans.clear()
    for number in (*range(6), 4, 3, 5, 2, 0):
        assert described(models, asked[number]) == fresh[number], asked[number]
        assert len(agreement._plans[models[0]]) <= 4, "plans of a long run would fill memory"
    kept = [agree_on_plan(models, None, "lm", **options).program for options in asked[:4]]
    assert all(
        agree_on_plan(models, None, "lm", **options).program is program
        for options, program in zip(asked, kept, strict=False)
    )


def test_each_of_several_calls_gets_what_a_first_call_gets():
    pool.run(2, in_a_row)


def one_rank_forgets():
    """Run in each worker: one rank has lost its cached plans, and then both ranks plan again."""
    DIMS.initialize(device="cpu")
    models = mb.build_model(HF, dims=DIMS, dtype=torch.float32, device="cpu", load_weights=random_state(HF))
    for number in range(4):
        if dist.get_rank() == number % 2:
            agreement._plans.clear()
        for options in ({}, {"bucket_bytes": 1 << 14}, {}):
            assert described(models, options) == described(models, options)
    newest, *others = agreement._plans[models[0]]
    newest = replace(newest, number=newest.number + dist.get_rank())  # like a plan made with other ranks
    agreement._plans[models[0]] = (newest, *others)
    again = agree_on_plan(models, None, "lm")
    assert again.program is not newest.program
    assert agreement._plans[models[0]][0].number == again.group.max(newest.number) + 1
    rank = dist.get_rank()
    for options, message in (
        ({"bucket_bytes": (1 + rank) << 14}, "expected the same bucket_bytes on every rank"),
        ({"expert_format": ("split", "fused")[rank]}, "expected the same expert_format on every rank"),
    ):
        with pytest.raises(ExportError, match=message):
            agree_on_plan(models, None, "lm", **options)
    add_adapters(models, rank=2, alpha=4, targets=["q_proj"])
    with pytest.raises(ExportError, match="expected the same merged and adapters on every rank"):
        agree_on_plan(models, None, "lm", merged=rank == 0)
    assert agree_on_plan(models, None, "lm", merged=True).bound.merges


def test_ranks_that_have_kept_different_plans_make_one_anew():
    pool.run(2, one_rank_forgets)


class Chunkless:
    """An object that is no module."""


NO_MODELS = ([], None, 3, [Chunkless()], [torch.nn.Linear(2, 2)])
IDS = torch.ones(1, 4, dtype=torch.int64)
OF_MODELS = {
    "iter_hf_weights": (lambda models, _: list(mb.iter_hf_weights(models, merged=False)), ExportError),
    "manifest": (lambda models, _: mb.manifest(models, merged=False), ExportError),
    "forward": (lambda models, _: mb.forward(models, IDS), BatchError, MappingError),
    "WeightSync": (lambda models, _: mb.WeightSync(models, merged=False), TransferError),
    "iter_hf_adapters": (lambda models, _: list(mb.iter_hf_adapters(models)), ExportError),
    "iter_peft_adapters": (lambda models, _: list(iter_peft_adapters(models)), ExportError),
    "save_hf_adapters": (mb.save_hf_adapters, CheckpointError),
    "set_adapters": (lambda models, _: mb.set_adapters(models, "default"), ConfigError, MappingError),
    "add_adapters": (lambda models, folder: mb.add_adapters(models, folder, name="new"), ConfigError, MappingError),
    "load_adapters": (mb.load_adapters, CheckpointError, MappingError),
    "build_draft": (mb.build_draft, ConfigError, MappingError),
}
"""Functions that all ranks call together, with models and a folder of adapters, and their errors."""
MESHES = {DIMS: OF_MODELS, ParallelDims(ep=2): dict(islice(OF_MODELS.items(), 3))}
"""The last mesh has two replicas that share experts, and one expects the other in some functions alone."""


def refused(call, *kinds):
    """The message of an error of one of these kinds, which ``call`` must raise on this rank."""
    with pytest.raises(BridgeError) as caught:
        call()
    assert type(caught.value) in kinds, caught.value
    return str(caught.value)


def one_rank_has_no_models(folder):
    """Run in each worker: on rank 1 all functions get other objects than models, and both ranks raise."""
    for dims, functions in MESHES.items():
        with stepping.mesh(dims):
            models = mb.build_model(HF, dims=dims, dtype=torch.float32, device="cpu", load_weights=False)
            models[0].eval()
            mb.add_adapters(models, rank=2, alpha=4, targets=["q_proj"])
            mb.save_hf_adapters(models, folder)
            names = [*functions, *["iter_hf_weights"] * len(NO_MODELS)]
            for name, instead in zip(names, cycle(NO_MODELS), strict=False):
                function, *kinds = functions[name]
                said = refused(partial(function, instead if dist.get_rank() else models, folder), *kinds)
                assert "rank 1" in said or dist.get_rank() or name == "build_draft", f"{name} {instead}: {said}"
            assert mb.forward(models, IDS).log_probs is not None


def test_a_rank_without_models_leaves_nobody_waiting(tmp_path):
    pool.run(2, one_rank_has_no_models, str(tmp_path), timeout=90)


def one_rank_has_other_adapters(folder):
    """Run in each worker: rank 1 has no adapters, or other ones, or uses others."""
    hf, dims, rank = tiny("qwen3", num_hidden_layers=2, vocab_size=96), ParallelDims(tp=2), dist.get_rank()
    with stepping.mesh(dims):
        options = {"dims": dims, "dtype": torch.float32, "device": "cpu", "load_weights": random_state(hf)}
        base, first, second = (mb.build_model(hf, **options) for _ in range(3))
        for models, name, options in (
            (first, "a", {"alpha": 4, "targets": ["q_proj"]}),
            (second, "a", {"alpha": 8, "targets": ["q_proj"]}),
            (second, "b", {"alpha": 4, "targets": ["q_proj"]}),
            (second, "c", {"alpha": 4, "targets": ["k_proj"]}),
        ):
            mb.add_adapters(models, rank=2, name=name, **options)
        merged = partial(mb.to_hf_state_dict, merged=True)
        together = {
            "export": (merged, ExportError),
            "manifest": (partial(mb.manifest, merged=True), ExportError),
            "save": (lambda given: mb.save_hf_checkpoint(given, folder, merged=True), CheckpointError),
            "adapters": (lambda given: list(mb.iter_hf_adapters(given)), ExportError),
            "peft": (lambda given: list(iter_peft_adapters(given)), ExportError),
            "folder": (lambda given: mb.save_hf_adapters(given, folder), CheckpointError),
            "checkpoint": (lambda given: mb.save_checkpoint(given, folder), CheckpointError),
        }
        for other, name in ((base, ""), (second, "a"), (second, "b"), (second, "c")):
            if name:
                mb.set_adapters(second, name)
            for what, (function, kind) in together.items():
                said = refused(partial(function, other if rank else first), kind)
                assert "adapters" in said, f"{what} {name}: {said}"
        assert_exact(mb.to_hf_state_dict(base if rank else first, merged=False), random_state(hf))
        mb.save_checkpoint(base if rank else first, folder, part="base")
        with mb.without_adapters(first) if rank else nullcontext():
            assert "off" in refused(lambda: merged(first), ExportError)
        assert merged(first)


def test_ranks_with_other_adapters_mix_nothing_and_leave_nobody_waiting(tmp_path):
    pool.run(2, one_rank_has_other_adapters, str(tmp_path), timeout=90)
