"""Training on real GPUs, with megatron-core's DDP and optimizers.

Gradients and their norm are those of one rank on every mesh, and what an export gives after a step is what the
optimizer holds, whatever is overlapped or offloaded.
"""

import functools
import importlib.util
import os
import traceback

import pytest
import torch
import torch.distributed as dist

import mcore_bridge as mb
from mcore_bridge.commands.options import smallest_world
from tests import records
from tests.stepping import masters, trained
from tests.strategies import random_state
from tests.test_gpu import DENSE, SPARSE, with_replicas
from tests.test_gpu_export import spawn

pytestmark = pytest.mark.multigpu

FAMILIES = {name: {**DENSE, **SPARSE}[name] for name in ("qwen3", "gemma2", "qwen3_moe", "deepseek_v3", "gpt_oss")}
MESHES = {
    1: [],
    2: [
        mb.ParallelDims(tp=2, sp=True),
        mb.ParallelDims(cp=2),
        mb.ParallelDims(pp=2, vp=2),
        mb.ParallelDims(ep=2),
        mb.ParallelDims(tp=2, ep=2, sp=True),
    ],
    4: [
        mb.ParallelDims(tp=2, sp=True),  # and two replicas
        mb.ParallelDims(tp=2, pp=2, ep=2, sp=True),
        mb.ParallelDims(tp=2, cp=2, sp=True),
        mb.ParallelDims(cp=4),
        mb.ParallelDims(tp=2, ep=2, etp=2, sp=True),
    ],
    8: [mb.ParallelDims(tp=2, pp=4, sp=True), mb.ParallelDims(tp=2, cp=2, pp=2, ep=4, sp=True)],
}
"""Beside data parallelism alone, with which they are compared; the first on 8 GPUs is siiRL's."""
SWITCHES = {
    "recompute all": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "recompute blocks": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    "recompute attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "recompute norms": {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp"]},
    "fused rope": {"apply_rope_fusion": True},
    "fused rest": {
        "bias_activation_fusion": True,
        "bias_dropout_fusion": True,
        "masked_softmax_fusion": True,
        "cross_entropy_loss_fusion": True,
    },
    "plain experts": {"moe_permute_fusion": False, "moe_token_dispatcher_type": "allgather"},
    "fp32 router": {"moe_router_dtype": "fp32", "deallocate_pipeline_outputs": True},
}
"""What configs of trainers set, and none of which changes what is computed."""
if importlib.util.find_spec("fused_weight_gradient_mlp_cuda"):  # of Apex, without which megatron-core refuses it
    SWITCHES["fused gradients"] = {"gradient_accumulation_fusion": True}
CHECKS = {
    "gradients": lambda task: task in ("gradients", "gradients of rows"),
    "optimizer": lambda task: "gradients" not in task,
    "switches": lambda task: "gradients," in task,
}
"""What is recorded, of which tasks."""
ROWS, LONG, STEPS = 8, 48, 3
BOUND = 2e-5  # of a gradient in fp32, relative to its largest value


def batch():
    """Tokens, mask and weights ``[ROWS, LONG]``: rows of odd lengths, padded on either side."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 500, (ROWS, LONG), generator=generator)
    mask = torch.zeros(ROWS, LONG, dtype=torch.int64)
    for row in range(ROWS):
        mask[row, row : LONG - 3 * row] = 1
    return ids.cuda(), mask.cuda(), torch.randn(ROWS, LONG, generator=generator).cuda()


def step(models, dims, *, packed):
    """Forward and backward of this replica's rows, one at a time."""
    from megatron.core import parallel_state

    share = slice(parallel_state.get_data_parallel_rank(), None, dims.dp(dist.get_world_size()))
    ids, mask, weights = (tensor[share] for tensor in batch())
    for model in models:
        model.zero_grad_buffer()
    mb.forward(
        models,
        ids,
        mask,
        loss=lambda outputs, rows: (outputs.log_probs * weights[rows]).sum() / LONG,
        micro_batch_size=1,
        packed=packed,
    )


def wrapped(chunks, **settings):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **settings)
    models = [DistributedDataParallel(chunk.config, config, chunk) for chunk in chunks]
    syncs = [model.no_sync for model in models]
    chunks[0].config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
    chunks[0].config.finalize_model_grads_func = finalize_model_grads
    return models


def optimizer_of(models, **settings):
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    return get_megatron_optimizer(OptimizerConfig(lr=1e-3, weight_decay=0.0, clip_grad=1e9, **settings), models)


def gradients(hf, dims, state, *, packed=True, **overrides):
    """By HF name, in fp32; and the norm that megatron-core makes of them."""
    chunks = mb.build_model(hf, dims=dims, dtype=torch.float32, load_weights=state, overrides=overrides)
    models = wrapped(chunks)
    optimizer = optimizer_of(models)
    step(models, dims, packed=packed)
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    for parameter in trained(chunks):  # gradients have the places of their parameters
        parameter.data.copy_(parameter.main_grad)
    exported = mb.to_hf_state_dict(chunks)
    return {name: exported[name] for name in exported if "correction_bias" not in name}, norm


def compare(found, expected):
    """What of the gradients on a mesh is not what it is without one."""
    (grads, norm), (known, known_norm) = found, expected
    whole = float(torch.stack([grad.double().square().sum() for grad in known.values()]).sum().sqrt())
    problems = [] if abs(known_norm / whole - 1) < 1e-5 else [f"norm without a mesh {known_norm}, of all {whole}"]
    if not abs(norm / known_norm - 1) < 1e-5:
        problems.append(f"norm {norm}, expected {known_norm}")
    for name, grad in known.items():
        error = float((grads[name] - grad).abs().max() / grad.abs().max().clamp(min=1e-30))
        if not error < BOUND:
            problems.append(f"{name} {error:.1e}")
    return problems


def differing(found, expected):
    return [name for name in expected if not torch.equal(found[name], expected[name])]


def train(hf, dims, state, dtype, *, overlap):
    """Some steps, and what was wrong with what was exported after each of them."""
    state = {name: tensor.to(dtype) for name, tensor in state.items()}
    chunks = mb.build_model(hf, dims=dims, dtype=dtype, load_weights=state)
    models = wrapped(chunks, use_distributed_optimizer=True, overlap_grad_reduce=overlap, overlap_param_gather=overlap)
    half = {torch.bfloat16: {"bf16": True}, torch.float16: {"fp16": True, "initial_loss_scale": 1024.0}}[dtype]
    optimizer = optimizer_of(models, use_distributed_optimizer=True, overlap_param_gather=overlap, **half)
    chunks[0].config.grad_scale_func = optimizer.scale_loss
    problems, before = [], mb.to_hf_state_dict(models)
    for number in range(STEPS):
        step(models, dims, packed=True)
        successful, *_ = optimizer.step()
        exported = mb.to_hf_state_dict(models if number % 2 else chunks)
        unmoved = [name for name in before if torch.equal(before[name], exported[name])]
        if not successful or len(unmoved) > len(before) // 2:
            problems.append(f"step {number}: successful {successful}, unmoved {unmoved}")
        held = masters(models, optimizer)
        for parameter, value in held.items():
            parameter.data.copy_(value)
        problems += [f"step {number}: stale {name}" for name in differing(exported, mb.to_hf_state_dict(models))]
        before = exported
    problems += [f"offloaded: {name}" for name in offloaded(models, optimizer, before)]
    everywhere = [None] * dist.get_world_size()
    sums = {name: float(tensor.double().sum()) for name, tensor in before.items()}
    dist.all_gather_object(everywhere, sums)
    return problems + [f"replicas differ: {each}" for each in everywhere if each != sums]


def offloaded(models, optimizer, expected):
    """What an export gives otherwise while gradients, the optimizer's state and parameters are on CPU."""
    expected = {name: tensor.cpu() for name, tensor in expected.items()}

    def wrong_now():
        return differing(mb.to_hf_state_dict(models, device="cpu"), expected)

    for model in models:
        for buffer in model.buffers + model.expert_parallel_buffers:
            buffer.grad_data.untyped_storage().resize_(0)
    wrong = wrong_now()
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        for values in each.optimizer.state.values():
            values.update((key, value.cpu()) for key, value in values.items() if torch.is_tensor(value))
    wrong += wrong_now()
    for model in models:
        model.start_param_sync(force_sync=True)  # what an export of moved parameters asks for
        for parameter in model.parameters():
            parameter.data = parameter.data.cpu()
    wrong += wrong_now()
    for model in models:
        for parameter in model.parameters():
            parameter.data = parameter.data.cuda()
    return wrong + wrong_now()


def tasks(family, dims, world_size):
    """All that is tried of a family on a mesh, by name."""
    hf = FAMILIES[family]
    state = random_state(hf)
    found = {
        "gradients": functools.partial(gradients, hf, dims, state),
        "gradients of rows": functools.partial(gradients, hf, dims, state, packed=False),
        "bfloat16": functools.partial(train, hf, dims, state, torch.bfloat16, overlap=False),
        "bfloat16 overlapped": functools.partial(train, hf, dims, state, torch.bfloat16, overlap=True),
    }
    if family == "qwen3":
        found["float16"] = functools.partial(train, hf, dims, state, torch.float16, overlap=True)
    if world_size == 1 and family in ("qwen3", "qwen3_moe"):
        for switch, overrides in SWITCHES.items():
            found[f"gradients, {switch}"] = functools.partial(gradients, hf, dims, state, **overrides)
    return found


def rank_main(rank, world_size):
    """Every family in every way on every mesh of this size: what was wrong."""
    from megatron.core import parallel_state

    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    findings, expected = {}, {}
    for dims in [mb.ParallelDims(), *MESHES[world_size]]:
        dims.initialize(device="cuda")
        assert world_size % smallest_world(dims) == 0
        mesh = with_replicas(dims, world_size)
        for family in FAMILIES:
            if (dims.ep > 1 and family not in SPARSE) or (dims.etp > 1 and family == "gpt_oss"):
                continue
            for task, run in tasks(family, dims, world_size).items():
                try:
                    found = run()
                    if "gradients" in task:
                        if task == "gradients" and dims == mb.ParallelDims():
                            expected[family] = found
                        found = compare(found, expected[family])
                except Exception:
                    found = [traceback.format_exc()]
                findings[mesh, family, task] = found
                if rank == 0:
                    last = "; ".join(found).strip().splitlines()[-1][:300] if found else "right"
                    print(mesh, family, task, last, flush=True)
        parallel_state.destroy_model_parallel()
    return findings


@pytest.mark.parametrize("world_size", MESHES)
def test_training_is_that_of_one_rank_and_exports_are_what_the_optimizer_holds(world_size, tmp_path, request):
    found = spawn(rank_main, tmp_path, world_size)
    assert all(isinstance(findings, dict) for findings in found), found
    everything = [each for findings in found for each in findings.items()]
    for check, is_of in CHECKS.items():
        passed = [(key[:2], not problems) for key, problems in everything if is_of(key[2])]
        records.append(request.config.getoption("--record"), check, world_size, passed)
    wrong = {key: problems for key, problems in everything if problems}
    assert not wrong, "\n".join(f"{key}: {problems}" for key, problems in wrong.items())
