"""Whole steps with adapters: megatron-core's DDP and distributed optimizer, compared with ``peft`` and torch's Adam."""

from typing import Any

import pytest
import torch
from megatron.core.transformer.module import Float16Module

from mcore_bridge import ParallelDims, build_model
from mcore_bridge.factory.add_adapters import add_adapters
from mcore_bridge.weights.bound import bind
from mcore_bridge.weights.peft.hf_adapters import iter_hf_adapters
from tests import zoo
from tests.support import pool, stepping, tiny
from tests.support.peft_models import ALPHA, EXPERTS, RANK, batch, by_name, entries, expected, fill, held
from tests.workers.verl_engine import CpuForCuda

TARGETS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LR, EPS, CLIP = 0.1, 0.01, 0.5
"""With this eps, Adam's first step depends on how large a gradient is, and not on its sign alone."""
SP = {"tp": 2, "sp": True}
MESHES: dict[int, list[dict[str, Any]]] = {
    2: [{}, SP, {"tp": 2, "sp": True, "etp": 2}, {"etp": 2}],
    4: [{**SP, "ep": 2}, {**SP, "etp": 2}, {"tp": 4, "sp": True, "etp": 2}, {**SP, "pp": 2}],
}


def steps(folder, meshes, targets, expert_format, values):
    """Run in each worker: for each mesh the loss, the norm, the adapters after a step, and this rank's shards."""
    found = []
    for sizes in meshes:
        dims = ParallelDims(**sizes)
        with stepping.mesh(dims):
            chunks = build_model(folder, dims=dims, dtype=torch.float32, device="cpu")
            made = add_adapters(chunks, rank=RANK, alpha=ALPHA, targets=targets, expert_format=expert_format)
            fill(chunks, made, values)
            wrapped = stepping.wrap(chunks, overlap_grad_reduce=True, use_distributed_optimizer=True)
            chunks[0].config.no_sync_func = wrapped[0].no_sync
            optimizer = stepping.distributed_optimizer(wrapped, lr=LR, adam_eps=EPS, clip_grad=CLIP)
            loss = stepping.forward_backward(wrapped, dims, batch(), micro_batch_size=2)
            with CpuForCuda():
                _, norm, _ = optimizer.step()
            bound, shards = bind(chunks, adapters=made), {}
            is_cut = by_name(chunks, lambda parameter: torch.full(parameter.shape[:1], parameter.partition_dim >= 0))
            for name, factor in held(chunks).items():
                shard = bound.ranks[made.mapping.bind(name).axis] if is_cut[name].all() else 0
                shards[f"{name} {shard}"] = factor.detach().clone()
            step = {"loss": loss, "norm": norm, "adapters": entries(iter_hf_adapters(chunks)), "shards": shards}
            found.append((str(sizes), "", step))
    return found


def expected_step(hf, targets, expert_format):
    """Computed by ``peft``: the factors before a step, its loss, the norm of its gradients, the factors after it."""
    before, loss, grads = expected(hf, targets, expert_format)
    after = {name: torch.nn.Parameter(value.clone()) for name, value in before.items()}
    for name, parameter in after.items():
        parameter.grad = grads[name]
    norm = torch.nn.utils.clip_grad_norm_(after.values(), CLIP)
    torch.optim.Adam(after.values(), lr=LR, eps=EPS).step()
    return before, loss, norm, {name: parameter.detach() for name, parameter in after.items()}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    hf, folder = zoo.cases()["deepseek_v3"].hf, tmp_path_factory.mktemp("tiny")
    tiny.random_checkpoint(hf, folder)
    targets, expert_format = ((*TARGETS, *EXPERTS), "fused") if zoo.NEWEST else (TARGETS, "split")
    return str(folder), targets, expert_format, expected_step(hf, targets, expert_format)


@pytest.mark.parametrize("world_size", MESHES)
def test_a_whole_step_is_that_of_peft_and_replicas_stay_equal(case, world_size):
    folder, targets, expert_format, (before, loss, norm, after) = case
    assert norm > 2 * CLIP
    ranks = pool.run(world_size, steps, folder, MESHES[world_size], targets, expert_format, before)
    for results in zip(*ranks, strict=True):
        tiny.assert_losses(results, loss)
        shards: dict[str, Any] = {}
        for label, _, step in results:
            assert step["norm"] == pytest.approx(float(norm), rel=1e-5), label
            tiny.assert_near(step["adapters"], after, label)
            for name, shard in step["shards"].items():
                assert torch.equal(shards.setdefault(name, shard), shard), f"{label}: {name} differs among replicas"


def second_losses(folder, targets, expert_format, values):
    """Runs in each worker: the loss after a step that gathers parameters, or leaves it to the next forward."""
    losses = []
    for late in (False, True):
        with stepping.mesh(ParallelDims()):
            chunks = build_model(folder, dims=ParallelDims(), dtype=torch.float32, device="cpu")
            made = add_adapters(chunks, rank=RANK, alpha=ALPHA, targets=targets, expert_format=expert_format)
            fill(chunks, made, values)
            options = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": late}
            (model,) = wrapped = stepping.wrap(chunks, bucket_size=1, **options)
            chunks[0].config.no_sync_func = model.no_sync
            optimizer = stepping.distributed_optimizer(wrapped, lr=LR, overlap_param_gather=late)
            stepping.forward_backward(wrapped, ParallelDims(), batch(), micro_batch_size=2)
            with CpuForCuda():
                optimizer.step()
            model.zero_grad_buffer()
            losses.append(stepping.forward_backward(wrapped, ParallelDims(), batch(), micro_batch_size=2))
    return losses


def test_a_forward_gathers_what_a_step_has_left(case):
    folder, targets, expert_format, (before, loss, _, _) = case
    for at_once, late in pool.run(2, second_losses, folder, targets, expert_format, before):
        assert torch.equal(at_once, late)
        assert not torch.isclose(at_once, loss)


def halves(folder, targets, values):
    """Runs in each worker: a step of a bf16 model with adapters in its dtype, and with some in fp32."""
    found = []
    for dtype in (None, torch.float32):
        with stepping.mesh(ParallelDims(**SP)):
            chunks = build_model(folder, dims=ParallelDims(**SP), dtype=torch.bfloat16, device="cpu")
            made = add_adapters(chunks, rank=RANK, alpha=ALPHA, targets=targets, dtype=dtype)
            fill(chunks, made, values)
            wrapped = stepping.wrap(
                [Float16Module(chunk.config, chunk) for chunk in chunks], use_distributed_optimizer=True
            )
            optimizer = stepping.distributed_optimizer(wrapped, lr=LR, adam_eps=EPS, clip_grad=CLIP, bf16=True)
            stepping.forward_backward(wrapped, ParallelDims(**SP), batch(), micro_batch_size=4)
            with CpuForCuda():
                _, norm, _ = optimizer.step()
            found.append((norm, entries(iter_hf_adapters(chunks))))
    return found


def test_a_bf16_model_trains_adapters_of_either_dtype(tmp_path):
    hf, targets = tiny.config("qwen3"), TARGETS[4:]
    tiny.random_checkpoint(hf, tmp_path, dtype=torch.bfloat16)
    before, _, norm, after = expected_step(hf, targets, "")
    truth = torch.cat([(after[name] - before[name]).flatten() for name in after])
    for steps_of_rank in pool.run(2, halves, str(tmp_path), targets, before):
        for dtype, (found, adapters) in zip((torch.bfloat16, torch.float32), steps_of_rank, strict=True):
            assert found == pytest.approx(float(norm), rel=0.03)
            moved = torch.cat([(adapters[name].float() - before[name]).flatten() for name in after])
            assert {tensor.dtype for tensor in adapters.values()} == {dtype}
            assert torch.cosine_similarity(moved, truth, dim=0) > 0.998
        assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in adapters.values()), "not rounded"
