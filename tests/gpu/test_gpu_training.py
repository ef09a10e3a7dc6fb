"""Training on real GPUs, with megatron-core's DDP and optimizers.

On every mesh, losses, gradients and their norm equal the results of one rank. Gradients in bf16 have errors like the
gradients of torch's modules. An export after a step has the optimizer's values, with any overlap or offload. Some
families are tested in every way, all others in three.
"""

import contextlib
import copy
import functools
import traceback
import types

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig

import mcore_bridge as mb
from tests.support import gpu_batches, records
from tests.support.gpu_batches import has_experts, is_refused
from tests.support.gpu_gradients import ROUNDED, away, buffers_of, by_name, distances, wrapped
from tests.support.gpus import chosen, spawn, with_replicas
from tests.support.stepping import masters, trained
from tests.support.strategies import random_state

pytestmark = pytest.mark.multigpu


def undropped(hf):
    """A model without dropout, which some configs have: every mesh would drop other values."""
    hf = copy.deepcopy(hf)
    for name in hf.to_dict():
        if name.endswith(("dropout", "pdrop")):
            setattr(hf, name, 0.0)
    return hf


SIZED = ("qwen3", "gemma2", "qwen3_moe", "deepseek_v3", "gpt_oss")
_EVERY = {**gpu_batches.FAMILIES["sized"], **gpu_batches.FAMILIES["zoo"]}
FAMILIES = {
    "sized": {name: undropped(_EVERY[name]) for name in SIZED},
    "zoo": {name: undropped(hf) for name, hf in _EVERY.items() if name not in SIZED},
}
"""The families that run all checks, and all others that are built."""
MESHES = {
    1: [],
    2: [
        mb.ParallelDims(tp=2, sp=True),
        mb.ParallelDims(tp=2),
        mb.ParallelDims(cp=2),
        mb.ParallelDims(pp=2, vp=2),
        mb.ParallelDims(ep=2),
        mb.ParallelDims(tp=2, ep=2, sp=True),
        mb.ParallelDims(tp=2, etp=2, sp=True),
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
"""Meshes in addition to data parallelism alone. The first one of 8 GPUs is siiRL's."""
SWITCHES = {
    "recompute all": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "recompute blocks": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    "attention must not be recomputed": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "recompute norms": {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp"]},
    "fused rope": {"apply_rope_fusion": True},
    "fused rest": {
        "bias_activation_fusion": True,
        "bias_dropout_fusion": True,
    },
    "plain experts": {"moe_permute_fusion": False, "moe_token_dispatcher_type": "allgather"},
    "fp32 router": {"moe_router_dtype": "fp32", "deallocate_pipeline_outputs": True},
    "fused gradients": {"gradient_accumulation_fusion": True},
}
"""Settings from configs of trainers, none of which changes results."""
SHARED = {"overlapped shared experts": {"moe_shared_expert_overlap": True, "moe_token_dispatcher_type": "alltoall"}}
"""Settings for models with shared experts."""
CHECKS = {
    "gradients": lambda task: task in ("gradients", "gradients of rows"),
    "gradients in bf16": lambda task: task == "bfloat16 gradients",
    "optimizer": lambda task: "gradients" not in task,
    "switches": lambda task: "gradients," in task,
}
"""The names of recorded checks, each with its tasks."""
ROWS, AT_ONCE, LONG, STEPS = 16, 2, 48, 3
BOUND = 2e-5  # error of a gradient in fp32, relative to its largest value
LINEAR = 5e-5  # for linear attention: qwen3_next has 2.1e-5 over two replicas
CANCELLED = 1e-8  # of the norm: rounding errors of sums that are zero, such as for a bias of keys without rope
OVERFLOW, HALVINGS = 2.0**26, 12
"""A loss scale with which gradients of logits overflow in fp16, and the number of halvings after which they do not."""


def stand_in_for_apex():
    """Replaces a kernel of Apex by which linear layers of megatron-core sum gradients. TransformerEngine has
    another.
    """
    from megatron.core.tensor_parallel import layers

    def add_up(inputs, grads, main):
        main.add_(grads.flatten(0, -2).t() @ inputs.flatten(0, -2))

    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(wgrad_gemm_accum_fp32=add_up)
        layers._grad_accum_fusion_available = True


def batch(hf):
    """Tokens, mask and weights ``[ROWS, LONG]``: rows of 16 to 47 tokens, padded on either side.

    In each microbatch of any number of replicas one length is odd and one is even, so that every cut needs padding.
    """
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, hf.vocab_size, (ROWS, LONG), generator=generator)
    mask = torch.zeros(ROWS, LONG, dtype=torch.int64)
    for row in range(ROWS):
        length = LONG - 1 - 2 * (5 * row % ROWS) - row.bit_count() % 2
        mask[row, row % 2 : row % 2 + length] = 1
    return ids.cuda(), mask.cuda(), torch.randn(ROWS, LONG, generator=generator).cuda()


def run(hf, models, share, **how):
    """Run forward and backward of these rows; return the sum of their losses."""
    ids, mask, weights = (tensor[share] for tensor in batch(hf))
    outputs = mb.forward(
        models, ids, mask, loss=lambda outputs, rows: (outputs.log_probs * weights[rows]).sum() / LONG, **how
    )
    return (outputs.log_probs * weights).sum() / LONG


def step(hf, models, dims, *, packed):
    """Forward and backward of this replica's rows, several at a time; the sum of the losses of all replicas."""
    from megatron.core import parallel_state

    share = slice(parallel_state.get_data_parallel_rank(), None, dims.dp(dist.get_world_size()))
    for model in models:
        model.zero_grad_buffer()
    loss = run(hf, models, share, packed=packed, micro_batch_size=AT_ONCE)
    dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
    return float(loss)


def optimizer_of(models, **settings):
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    return get_megatron_optimizer(OptimizerConfig(lr=1e-3, weight_decay=0.0, clip_grad=1e9, **settings), models)


def alone(hf, state):
    """The result of ``gradients`` for one rank that has all rows, one by one without padding.

    It uses no DDP and no optimizer, and no TransformerEngine, whose backward differs. On a mesh of replicas alone,
    every rank computes it.
    """
    how = {"dims": mb.ParallelDims(), "dtype": torch.float32, "load_weights": state, "backend": "torch"}
    (model,) = mb.build_model(hf, **how)
    for parameter in trained([model]):
        parameter.grad = torch.zeros_like(parameter)  # the gradient of an expert without tokens stays zero
    loss = run(hf, model, slice(None), packed=False, micro_batch_size=1)
    found = by_name([model], lambda parameter: AT_ONCE * parameter.grad)  # since the mean is over fewer microbatches
    norm = torch.stack([grad.double().square().sum() for grad in found.values()]).sum().sqrt()
    return found, float(norm), float(loss)


def learned(hf, dims, state, *, packed=True, dtype=torch.float32, backend="auto", **overrides):
    """Chunks with gradients, wrapped, and the loss of all replicas."""
    how = {"dims": dims, "dtype": dtype, "backend": backend, "overrides": overrides}
    chunks = mb.build_model(hf, **how, load_weights=state)
    models = wrapped(chunks)
    return chunks, models, step(hf, models, dims, packed=packed)


def gradients(hf, dims, state, **how):
    """Gradients by HF name, in fp32; the norm that megatron-core computes; and the loss of all replicas."""
    chunks, models, loss = learned(hf, dims, state, **how)
    optimizer = optimizer_of(models)
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    return by_name(chunks, lambda parameter: parameter.main_grad), norm, loss


def with_every_expert(hf, dims, state, *, dtype=torch.bfloat16, **how):
    """Gradients by HF name, in this dtype; other choices of a router in bf16 change them little.

    All experts are chosen, except in llama4_text, whose config can only express one.
    """
    count = mb.to_transformer_config(hf).num_moe_experts
    chosen = {"moe_router_topk": count} if has_experts(hf) and hf.model_type != "llama4_text" else {}
    every = torch.arange(count or 0)  # in place of the experts that a table chooses for each token
    state = {name: every.repeat(len(t), 1) if name.endswith("tid2eid") else t for name, t in state.items()}
    chunks, *_ = learned(hf, dims, state, dtype=dtype, **chosen, **how)
    return by_name(chunks, lambda parameter: parameter.main_grad)


def compare(found, expected, hf):
    """Gradients that differ between a mesh and one rank."""
    bound = LINEAR if "linear_attention" in (getattr(hf, "layer_types", None) or ()) else BOUND
    (grads, *sums), (known, *known_sums) = found, expected
    problems = [
        f"{what} {own}, expected {other}"
        for what, own, other in zip(("norm", "loss"), sums, known_sums, strict=True)
        if not abs(own / other - 1) < bound
    ]
    for name, grad in known.items():
        error, most = float((grads[name] - grad).abs().max()), float(grad.abs().max())
        if not error < max(bound * most, CANCELLED * known_sums[0]):
            problems.append(f"{name} {error:.1e} of {most:.1e}")
    return problems


def by_torch(hf, state):
    """The gradients of torch's modules, in fp32 and in bf16, on a mesh of replicas alone."""
    dtypes = torch.float32, torch.bfloat16
    return [with_every_expert(hf, mb.ParallelDims(), state, dtype=dtype, backend="torch") for dtype in dtypes]


def rounded(hf, dims, state, known):
    """Parameters whose bf16 gradients have larger errors than the errors of torch's modules allow."""
    exact, theirs = known()
    allowed, own = distances(theirs, exact), distances(with_every_expert(hf, dims, state), exact)
    ratios = {kind: distance / max(allowed[kind], 1e-30) for kind, distance in own.items()}
    if dist.get_rank() == 0:
        print(f"as far as {max(ratios.values()):.2f} of torch's, {max(ratios, key=ratios.get)}", flush=True)
    return [f"{kind} {ratio:.2f} times as far" for kind, ratio in ratios.items() if not ratio <= ROUNDED]


def differing(found, expected):
    return [name for name in expected if not torch.equal(found[name], expected[name])]


def advance(models, optimizer, before, exported_from):
    """After a backward: the export after the optimizer's step, whether a step was made, and what is wrong with it. A
    step that is skipped because of an overflow changes nothing.
    """
    successful, *_ = optimizer.step()
    exported = mb.to_hf_state_dict(exported_from)
    moved = differing(exported, before)
    is_right = len(moved) >= len(before) / 2 if successful else not moved
    problems = [] if is_right else [f"successful {successful}, moved {moved}"]
    for parameter, value in masters(models, optimizer).items():
        parameter.data.copy_(value)
    problems += [f"stale {name}" for name in differing(exported, mb.to_hf_state_dict(models))]
    return exported, successful, problems


def train(hf, dims, state, dtype, *, overlap, overflow=False):
    """Run some steps, and offload everything before the last. Return errors of the exports."""
    state = {name: tensor.to(dtype) for name, tensor in state.items()}
    chunks = mb.build_model(hf, dims=dims, dtype=dtype, load_weights=state)
    models = wrapped(chunks, use_distributed_optimizer=True, overlap_grad_reduce=overlap, overlap_param_gather=overlap)
    scale = {"fp16": True, "initial_loss_scale": OVERFLOW if overflow else 1024.0, "hysteresis": 1}
    half = scale if dtype is torch.float16 else {"bf16": True}
    optimizer = optimizer_of(models, use_distributed_optimizer=True, overlap_param_gather=overlap, **half)
    chunks[0].config.grad_scale_func = optimizer.scale_loss
    before, steps, problems = mb.to_hf_state_dict(models), [], []
    last = STEPS + HALVINGS * overflow
    for number in range(last + 1):
        if number == last:
            problems += [f"offloaded, {each}" for each in offloaded(models, optimizer, before)]
        step(hf, models, dims, packed=True)
        before, successful, wrong = advance(models, optimizer, before, models if number % 2 else chunks)
        problems += [f"step {number}: {each}" for each in wrong]
        steps.append(successful)
    if steps[0] == overflow or not all(steps[-STEPS:]):
        problems.append(f"successful steps: {steps}")
    everywhere = [None] * dist.get_world_size()
    sums = {name: float(tensor.double().sum()) for name, tensor in before.items()}
    dist.all_gather_object(everywhere, sums)
    return problems + [f"replicas differ: {each}" for each in everywhere if each != sums]


def gradients_away(models, optimizer):
    return away([buffer.grad_data for buffer in buffers_of(models)])


def state_away(models, optimizer):
    """The tensors that only the optimizer has: fp32 masters of this rank's share, and their moments."""
    tensors = []
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        tensors += [master for group in each.shard_fp32_from_float16_groups for master in group]
        tensors += [value for values in each.optimizer.state.values() for value in values.values()]
    return away([tensor for tensor in tensors if torch.is_tensor(tensor)])


@contextlib.contextmanager
def parameters_away(models, optimizer):
    """Replace parameters by others on the CPU: a parameter that is moved itself would lose the hooks of DDP."""
    for model in models:
        model.start_param_sync(force_sync=True)  # an export of moved parameters requires this
    modules = [module for model in models for module in model.modules()]
    places = [(module._parameters, *each) for module in modules for each in module.named_parameters(recurse=False)]
    for held, name, parameter in places:
        held[name] = torch.nn.Parameter(parameter.detach().to("cpu", copy=True), requires_grad=False)
    with away([buffer.param_data for buffer in buffers_of(models)]):
        yield
    for held, name, parameter in places:
        held[name] = parameter


AWAY = {"gradients": gradients_away, "optimizer": state_away, "parameters": parameters_away}


def offloaded(models, optimizer, expected):
    """The differences of exports while weights, gradients or optimizer states, and then all of them, are on the CPU."""
    expected, wrong = {name: tensor.cpu() for name, tensor in expected.items()}, []
    for names in [*([name] for name in AWAY), [*AWAY]]:
        with contextlib.ExitStack() as stack:
            for name in names:
                stack.enter_context(AWAY[name](models, optimizer))
            found = mb.to_hf_state_dict(models, device="cpu")
        wrong += [f"{names}: {name}" for name in differing(found, expected)]
    return wrong


def tasks(families, family, dims, world_size, known):
    """All tasks of a family on a mesh, by name. ``known`` returns the result of ``by_torch``."""
    hf = FAMILIES[families][family]
    state = random_state(hf)
    found = {
        "gradients": functools.partial(gradients, hf, dims, state),
        "bfloat16 gradients": functools.partial(rounded, hf, dims, random_state(hf, dtype=torch.bfloat16), known),
        "bfloat16 overlapped": functools.partial(train, hf, dims, state, torch.bfloat16, overlap=True),
    }
    if family == "llama4_text":  # rounding changes which expert a token has, and with it the gradients
        del found["bfloat16 gradients"]
    if families == "zoo":
        return found
    found["gradients of rows"] = functools.partial(gradients, hf, dims, state, packed=False)
    found["bfloat16"] = functools.partial(train, hf, dims, state, torch.bfloat16, overlap=False)
    if family in ("qwen3", "qwen3_moe"):
        half = functools.partial(train, hf, dims, state, torch.float16, overlap=True)
        found |= {"float16": half, "float16 from overflow": functools.partial(half, overflow=True)}
    switches = SWITCHES if world_size <= 2 and family in ("qwen3", "qwen3_moe") else {}
    for switch, overrides in (SHARED if family == "deepseek_v3" else switches).items():
        found[f"gradients, {switch}"] = functools.partial(gradients, hf, dims, state, **overrides)
    return found


def is_built(family, hf, dims):
    """megatron-core cuts no experts that have biases, and trains none under TP without SP."""
    if not has_experts(hf):
        return dims.ep == dims.etp == 1
    return (dims.etp == 1 or family != "gpt_oss") and (dims.tp == 1 or dims.sp)


def attempt(run, expected, dims, hf):
    """The errors of a run; None if the family is refused under context parallelism, by name."""
    try:
        found = run()
        return found if isinstance(found, list) else compare(found, expected(), hf)
    except Exception as error:
        return None if is_refused(error, dims, hf) else [traceback.format_exc()]


def rank_main(rank, world_size, families, names, meshes):
    """Check each of these families in every way on each of these meshes; return the errors."""
    from megatron.core import parallel_state

    stand_in_for_apex()
    findings, expected, known = {}, {}, {}
    for dims in [mb.ParallelDims(), *MESHES[world_size]]:
        dims.initialize(device="cuda")
        assert world_size % dims.smallest_world == 0
        mesh = with_replicas(dims, world_size)
        for family in names:
            hf = FAMILIES[families][family]
            if dims == mb.ParallelDims():
                expected[family] = functools.cache(functools.partial(alone, hf, random_state(hf)))
                state = random_state(hf, dtype=torch.bfloat16)
                known[family] = functools.cache(functools.partial(by_torch, hf, state))
                expected[family](), known[family]()  # here, on a mesh of replicas alone
            if mesh not in meshes or not is_built(family, hf, dims):
                continue
            for task, run in tasks(families, family, dims, world_size, known[family]).items():
                found = attempt(run, expected[family], dims, hf)
                if found is None:
                    continue
                findings[mesh, family, task] = found
                if rank == 0:
                    last = "; ".join(found).strip().splitlines()[-1][:300] if found else "right"
                    print(mesh, family, task, last, flush=True)
        parallel_state.destroy_model_parallel()
    return findings


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("families", FAMILIES)
@pytest.mark.parametrize("world_size", MESHES)
def test_training_is_that_of_one_rank_and_exports_are_what_the_optimizer_holds(world_size, families, tmp_path, request):
    names = chosen(request.config, FAMILIES[families])
    every = [with_replicas(dims, world_size) for dims in (mb.ParallelDims(), *MESHES[world_size])]
    meshes = chosen(request.config, every, "--meshes")
    found = spawn(rank_main, tmp_path, world_size, families, names, meshes)
    everything = [each for findings in found for each in findings.items()]
    for check, is_of in CHECKS.items():
        passed = [(key[:2], not problems) for key, problems in everything if is_of(key[2])]
        records.append(request.config.getoption("--record"), check, world_size, passed)
    wrong = {key: problems for key, problems in everything if problems}
    assert not wrong, "\n".join(f"{key}: {problems}" for key, problems in wrong.items())


LOSSES = {None: BOUND, "native": 2**-8, "te": BOUND}
"""Implementations of megatron-core's loss, plain and fused, and the bounds for gradients: in one implementation they
are bf16.
"""


def losses(rank, world_size):
    """megatron-core's loss of labels, in each of its implementations, and the gradient of the output layer."""
    hf = FAMILIES["sized"]["qwen3"]
    dims = mb.ParallelDims(tp=world_size, sp=world_size > 1)
    dims.initialize(device="cuda")
    ids, *_ = batch(hf)
    positions = torch.arange(LONG, device="cuda").expand_as(ids)
    found = {}
    for way in LOSSES:
        overrides = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": way} if way else {}
        (model,) = mb.build_model(
            hf, dims=dims, dtype=torch.float32, load_weights=random_state(hf), overrides=overrides
        )
        each = model(ids, positions, None, labels=ids.roll(-1, 1))
        each.sum().backward()
        found[way] = each.detach().cpu(), model.output_layer.weight.grad.cpu()
    log_probs = mb.forward(model, ids, torch.ones_like(ids)).log_probs
    return found, -log_probs[:, 1:].cpu()


@pytest.mark.parametrize("world_size", [1, 2])
def test_fused_losses_are_those_of_log_probs(world_size, tmp_path):
    for found, expected in spawn(losses, tmp_path, world_size):
        _, known = found[None]
        for way, (each, grad) in found.items():
            assert (each[:, :-1] - expected).abs().max() < BOUND * expected.max(), way
            assert (grad - known).abs().max() < LOSSES[way] * known.abs().max(), way


SIIRL = mb.ParallelDims(tp=2, pp=4, sp=True)
QWEN3_8B = AutoConfig.for_model(
    "qwen3",
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=4,  # of 36 layers: one in each stage
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    max_window_layers=36,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    tie_word_embeddings=False,
    vocab_size=515,  # of 151936
)


def siirl(rank, world_size):
    """Errors in gradients, and in steps of the distributed optimizer."""
    from megatron.core import parallel_state

    state = random_state(QWEN3_8B)
    mb.ParallelDims().initialize(device="cuda")
    expected = alone(QWEN3_8B, state)
    parallel_state.destroy_model_parallel()
    SIIRL.initialize(device="cuda")
    problems = compare(gradients(QWEN3_8B, SIIRL, state), expected, QWEN3_8B)
    return problems + train(QWEN3_8B, SIIRL, state, torch.bfloat16, overlap=True)


def test_qwen3_8b_on_the_mesh_of_siirl(tmp_path):
    """Qwen3-8B's config except the number of layers and the vocabulary; ``spawn`` skips without eight GPUs."""
    assert spawn(siirl, tmp_path, 8) == [[]] * 8
