"""Parameters in FP8 (``fp8_param``) on real GPUs: loads, exports, and the first masters of the distributed optimizer.

With ``--ranks-per-gpu 2`` one GPU is enough. Each result has a name, so that one run shows all that is wrong.
"""

import importlib.util
import tempfile
import traceback
from pathlib import Path

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge.weights.model_tensors import held_tensors
from tests.support import quantized, records
from tests.support.forward_batches import batch_of
from tests.support.gpu_gradients import wrapped
from tests.support.gpus import spawn, with_replicas
from tests.support.stepping import masters
from tests.support.strategies import random_state, tiny

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(not importlib.util.find_spec("transformer_engine"), reason="needs TransformerEngine"),
]

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 515,
}
FAMILIES = {
    "qwen3": tiny("qwen3", **SIZES),
    "qwen3_moe": tiny("qwen3_moe", **SIZES, num_experts=4, num_experts_per_tok=4, moe_intermediate_size=256),
}
"""All shards are whole blocks of 128 rows and columns."""
BLOCKS = quantized.deepseek((128, 128), rule=quantized.power_of_two)
"""What TransformerEngine makes of values in its blockwise recipe."""
CLASSES = {"delayed": "Float8Tensor", "tensorwise": "Float8Tensor", "blockwise": "Float8BlockwiseQTensor"}
TASKS = {
    1: [(mb.ParallelDims(), recipe, "qwen3") for recipe in CLASSES]
    + [(mb.ParallelDims(), "blockwise", "qwen3_moe"), (mb.ParallelDims(), "tensorwise", "qwen3_moe")],
    2: [
        (mb.ParallelDims(tp=2, sp=True), "blockwise", "qwen3"),
        (mb.ParallelDims(tp=2, sp=True), "delayed", "qwen3"),
        (mb.ParallelDims(), "blockwise", "qwen3"),  # two replicas
        (mb.ParallelDims(ep=2), "blockwise", "qwen3_moe"),
    ],
}
RATE = 1e-2


def rounded(values):
    """bf16 values after a way through FP8 blocks, by the publishers' formula on the CPU."""
    return BLOCKS.decode(BLOCKS.encode(values.cpu()), torch.bfloat16).to(values.device)


def is_near(found, values):
    """Whether values differ by no more than a step of e4m3 with one scale for the tensor allows."""
    scale = float(values.abs().max()) / 448
    return bool(((found - values).float().abs() <= values.float().abs() / 15 + scale * 2.0**-9).all())


def built(hf, dims, source, **overrides):
    return mb.build_model(hf, dims=dims, load_weights=source, dtype=torch.bfloat16, backend="te", overrides=overrides)


def in_fp8(models):
    """The parameters in FP8, by canonical name."""
    return {name: each for name, each in held_tensors(models).items() if hasattr(each, "quantize_")}


def equal(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def step(hf, models, optimizer):
    ids, mask = (tensor.cuda() for tensor in batch_of(hf))
    for model in models:
        model.zero_grad_buffer()
    optimizer.zero_grad()
    mb.forward(models, ids, mask, packed=True, loss=lambda outputs, rows: outputs.log_probs.sum())
    successful, *_ = optimizer.step()
    return bool(successful)


def optimizer_of(models, recipe):
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    settings = {"bf16": True, "use_distributed_optimizer": True, "fp8_recipe": recipe}
    return get_megatron_optimizer(OptimizerConfig(lr=0.0, weight_decay=0.0, clip_grad=0.0, **settings), models)


def expected_export(models, plain):
    """The export of a model in bf16 that has the values of ``models``."""
    values = {name: each.detach().dequantize() for name, each in in_fp8(models).items()}
    for name, tensor in held_tensors(plain).items():
        tensor.data.copy_(values.get(name, held_tensors(models)[name].detach()))
    return mb.to_hf_state_dict(plain)


def examine(hf, dims, recipe, folder):
    """Yield the name of each result, and whether it is right."""
    settings = {"fp8": "hybrid", "fp8_recipe": recipe, "fp8_param": True}
    state = random_state(hf, dtype=torch.bfloat16)
    plain, models = built(hf, dims, state), built(hf, dims, state, **settings)
    loaded = {name: tensor.detach().clone() for name, tensor in held_tensors(plain).items()}
    held = in_fp8(models)
    yield "some are in FP8", len(held) > 3 and {type(each).__name__ for each in held.values()} == {CLASSES[recipe]}
    near = {name: is_near(each.detach().dequantize(), loaded[name]) for name, each in held.items()}
    yield f"values are near {[name for name in near if not near[name]]}", all(near.values())
    if recipe == "blockwise":
        exact = {name: torch.equal(each.detach().dequantize(), rounded(loaded[name])) for name, each in held.items()}
        yield f"values are TransformerEngine's {[name for name in exact if not exact[name]]}", all(exact.values())
    first = {name: each.get_high_precision_init_val() for name, each in held.items()}
    yield "first masters are loaded", all(torch.equal(first[name], loaded[name].cpu()) for name in held)
    exported = mb.to_hf_state_dict(models)
    yield "the export has the values", equal(exported, expected_export(models, plain))
    yield (
        "other tensors are exact",
        all(
            torch.equal(exported[name].cpu(), tensor)
            for name, tensor in state.items()
            if "norm" in name or "embed" in name
        ),
    )
    yield "the export has new values", not equal(exported, {name: each.cuda() for name, each in state.items()})
    if recipe == "blockwise":
        published = built(folder, dims, True, **settings)
        manifest = mb.manifest(published, quantize="as_published", digests=True)
        yield "it leaves as published", not mb.Manifest.from_folder(folder, digests=True).differences(manifest)
    yield from trained(hf, models, plain, loaded, recipe)


def trained(hf, chunks, plain, loaded, recipe):
    """A step without a change, a step with one, and a load after the optimizer was made."""
    models = wrapped(chunks, use_distributed_optimizer=True, fp8_param_gather=True)
    before = mb.to_hf_state_dict(models)
    optimizer = optimizer_of(models, recipe)
    chunks[0].config.grad_scale_func = optimizer.scale_loss
    names = {id(each): name for name, each in held_tensors(chunks).items()}
    own = lambda: {names[id(each)]: value for each, value in masters(models, optimizer).items()}  # noqa: E731
    at_first = {name: loaded[name].float() for name in own()}
    yield "masters begin at loaded values", equal(own(), at_first)
    yield "step", step(hf, models, optimizer)
    yield "masters stay at a rate of 0", equal(own(), at_first)
    after = mb.to_hf_state_dict(models)
    yield "an export after this step is a model's", equal(after, expected_export(chunks, plain))
    if recipe != "delayed":  # whose scale is one of steps before
        yield "an export after this step is equal", equal(after, before)
    for group in optimizer.param_groups:
        group["lr"] = RATE
    yield "second step", step(hf, models, optimizer)
    moved, after = own(), mb.to_hf_state_dict(models)
    yield "masters move", not equal(moved, at_first)
    yield "an export has the new values", equal(after, expected_export(chunks, plain)) and not equal(after, before)
    held = in_fp8(chunks)
    if recipe == "blockwise":
        expected = {name: rounded(moved[name].bfloat16()) for name in held}
        yield "it is bf16 masters in FP8", equal({name: held[name].detach().dequantize() for name in held}, expected)
    mb.load_hf_weights(models, before)
    optimizer.reload_model_params()
    values = {name: held[name].detach().dequantize().float() for name in held}
    again = own()
    yield "reloaded masters are the values", equal({name: again[name] for name in held}, values)
    if recipe == "blockwise":
        yield "a load gives the values back", equal(mb.to_hf_state_dict(models), before)


def rank_main(rank, world_size):
    """All results of all tasks, by mesh, family and recipe."""
    from megatron.core import parallel_state

    findings = {}
    for dims, recipe, family in TASKS[world_size]:
        dims.initialize(device="cuda")
        hf, found = FAMILIES[family], {}
        with tempfile.TemporaryDirectory() as folder:
            try:
                quantized.write(hf, BLOCKS, Path(folder), dtype=torch.bfloat16)
                found.update(examine(hf, dims, recipe, folder))
            except Exception:
                found[traceback.format_exc()] = False
        wrong = [name for name, is_right in found.items() if not is_right]
        findings[with_replicas(dims, world_size), family, recipe] = found
        print(f"rank {rank}, {dims}, {family}, {recipe}: {len(found)} results, wrong:", *wrong, sep="\n  ", flush=True)
        parallel_state.destroy_model_parallel()
    return findings


@pytest.mark.parametrize("world_size", TASKS)
def test_parameters_in_fp8(world_size, tmp_path, request):
    found = [item for findings in spawn(rank_main, tmp_path, world_size) for item in findings.items()]
    passed = [((mesh, family), all(each.values())) for (mesh, family, _), each in found]
    records.append(request.config.getoption("--record"), "fp8 parameters", world_size, passed)
    wrong = {key: [name for name, is_right in each.items() if not is_right] for key, each in found}
    assert not any(wrong.values()), {key: names for key, names in wrong.items() if names}
