"""Parameters in FP8 (``fp8_param``) on real GPUs: loads, exports, checkpoints, and masters of distributed optimizers.

With ``--ranks-per-gpu 2`` one GPU is enough. Each result has a name, so that one run shows all that is wrong.
"""

import contextlib
import importlib.util
import tempfile
import traceback
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import mcore_bridge as mb
from mcore_bridge.errors import ConfigError, ExportError
from mcore_bridge.trainers.wrap import wrap
from mcore_bridge.weights.model_tensors import held_tensors
from tests.support import quantized, records
from tests.support.forward_batches import batch_of
from tests.support.gpu_gradients import away, buffers_of, wrapped
from tests.support.gpus import spawn, with_replicas
from tests.support.logs import messages_of
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
OF_ANY_SCALE = quantized.deepseek((128, 128))
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


def built(hf, dims, source, *, head="lm", **overrides):
    settings = {"dtype": torch.bfloat16, "backend": "te", "overrides": overrides}
    return mb.build_model(hf, dims=dims, load_weights=source, head=head, **settings)


def in_recipe(recipe):
    return {"fp8": "hybrid", "fp8_recipe": recipe, "fp8_param": True}


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


def optimizer_of(models, recipe, *, rate=0.0, **settings):
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    settings |= {"bf16": True, "use_distributed_optimizer": True, "fp8_recipe": recipe}
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=rate, weight_decay=0.0, clip_grad=0.0, **settings), models)
    models[0].config.grad_scale_func = optimizer.scale_loss
    return optimizer


def masters_of(models, optimizer):
    """The masters of all parameters, by canonical name."""
    names = {id(each): name for name, each in held_tensors(models).items()}
    return {names[id(each)]: value for each, value in masters(models, optimizer).items()}


def expected_export(models, plain):
    """The export of a model in bf16 that has the values of ``models``."""
    values = {name: each.detach().dequantize() for name, each in in_fp8(models).items()}
    for name, tensor in held_tensors(plain).items():
        tensor.data.copy_(values.get(name, held_tensors(models)[name].detach()))
    return mb.to_hf_state_dict(plain)


def examine(hf, dims, recipe, folder):
    """Yield the name of each result, and whether it is right."""
    settings = in_recipe(recipe)
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
    own = partial(masters_of, models, optimizer)
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


def late(hf, dims, recipe, folder):
    """Exports where replicas gather parameters in the next forward: right after a step, and during a gather."""
    options = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    state = random_state(hf, dtype=torch.bfloat16)
    plain, chunks = built(hf, dims, state), built(hf, dims, state, **in_recipe(recipe))
    models = wrapped(chunks, **options, fp8_param_gather=True)
    optimizer = optimizer_of(models, recipe, rate=RATE, overlap_param_gather=True)
    before = mb.to_hf_state_dict(models)
    yield "step", step(hf, models, optimizer)
    after = mb.to_hf_state_dict(models)
    yield (
        "an export after the step has new values",
        equal(after, expected_export(chunks, plain)) and not equal(after, before),
    )
    if recipe == "blockwise":
        found = {name: each.detach().dequantize() for name, each in in_fp8(chunks).items()}
        values = masters_of(models, optimizer)
        yield "these are bf16 masters in FP8", equal(found, {name: rounded(values[name].bfloat16()) for name in found})
    yield "second step", step(hf, models, optimizer)
    for model in models:
        model.start_param_sync()  # in flight
    again = mb.to_hf_state_dict(models)
    yield (
        "an export during a gather has new values",
        equal(again, expected_export(chunks, plain)) and not equal(again, after),
    )
    yield "transposes are new", all(map(is_transposed, in_fp8(chunks).values()))
    yield "third step", step(hf, models, optimizer)
    sums = {name: float(tensor.double().sum()) for name, tensor in mb.to_hf_state_dict(models).items()}
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, sums)
    yield "replicas are equal", all(each == sums for each in everywhere)


def is_transposed(parameter):
    """Whether the transpose for the backward, if there is one, has the codes of the parameter."""
    if hasattr(parameter, "_rowwise_data"):
        codes, transpose = parameter._rowwise_data, parameter._columnwise_data
    else:
        codes, transpose = parameter._data, None if parameter._transpose_invalid else parameter._transpose
    return transpose is None or torch.equal(transpose, codes.t())


def saved(hf, dims, recipe, folder):
    """A checkpoint after a step, read by models in bf16 and in FP8, without and with an optimizer."""
    ddp = {"use_distributed_optimizer": True, "fp8_param_gather": True}
    models = wrapped(built(hf, dims, random_state(hf, dtype=torch.bfloat16), **in_recipe(recipe)), **ddp)
    optimizer = optimizer_of(models, recipe, rate=RATE)
    yield "step", step(hf, models, optimizer)
    state, target = mb.to_hf_state_dict(models), folder / "saved"
    mb.save_checkpoint(models, target, optimizer=optimizer)
    plain, chunks = built(hf, dims, False), built(hf, dims, False, **in_recipe(recipe))
    mb.load_checkpoint(plain, target)
    yield "a model in bf16 has its values", equal(mb.to_hf_state_dict(plain), state)
    mb.load_checkpoint(chunks, target)
    values = held_tensors(plain)
    held = in_fp8(chunks)
    yield "values are near", all(is_near(each.detach().dequantize(), values[name]) for name, each in held.items())
    if recipe == "blockwise":
        yield "a model in FP8 has its values", equal(mb.to_hf_state_dict(chunks), state)
    first = {name: each.get_high_precision_init_val() for name, each in held.items()}
    yield "first masters are its values", equal(first, {name: values[name].detach().cpu() for name in held})
    others = wrapped(chunks, **ddp)
    own = optimizer_of(others, recipe, rate=RATE)
    with messages_of() as messages:
        mb.load_checkpoint(others, target, optimizer=own)
    yield f"nothing is logged {messages}", not messages
    yield "masters are its masters", equal(masters_of(others, own), masters_of(models, optimizer))
    yield "next step", step(hf, others, own)


def beside(hf, dims, recipe, folder):
    """Value heads, adapters, wrappers, scales of any value, and parameters that are on the CPU for a while."""
    settings, state = in_recipe(recipe), random_state(hf, dtype=torch.bfloat16)
    plain, models = built(hf, dims, state, head="value"), built(hf, dims, state, head="value", **settings)
    yield "a value head is in bf16", "output_layer.weight" not in in_fp8(models) and len(in_fp8(models)) > 3
    yield "an export has a value head", equal(mb.to_hf_state_dict(models), expected_export(models, plain))
    models = built(hf, dims, state, **settings)
    try:
        mb.add_adapters(models, rank=2, alpha=2, targets=["q_proj"])
    except ConfigError as error:
        yield f"adapters are refused: {error}", "fp8 must be off" in str(error)
    else:
        yield "adapters are refused", False
    before = mb.to_hf_state_dict(models)
    wrap(models, None)  # in Float16Module
    if recipe == "blockwise":
        yield "a wrapper keeps values", equal(mb.to_hf_state_dict(models), before)
        quantized.write(hf, OF_ANY_SCALE, folder / "any", dtype=torch.bfloat16)
        with messages_of() as messages:
            mb.load_hf_weights(models, folder / "any")
        yield (
            f"a load warns of lost codes {messages}",
            [f"{len(in_fp8(models))} param" in m for m in messages] == [True],
        )
    before = mb.to_hf_state_dict(models)
    models = wrapped(models, use_distributed_optimizer=True, fp8_param_gather=True)
    with away([buffer.param_data for buffer in buffers_of(models)]):
        refused = ""
        with contextlib.suppress(ExportError):
            mb.to_hf_state_dict(models)
            refused = "not"
        yield f"an export without memory is {refused} refused", not refused
    yield "an export after a return is equal", equal(mb.to_hf_state_dict(models), before)


def rank_main(rank, world_size):
    """All results of all tasks, by mesh, family and recipe."""
    from megatron.core import parallel_state

    findings = {}
    for dims, recipe, family in TASKS[world_size]:
        dims.initialize(device="cuda")
        hf, found = FAMILIES[family], {}
        with tempfile.TemporaryDirectory() as folder:
            shared = [folder]
            dist.broadcast_object_list(shared)  # all ranks write one checkpoint
            quantized.write(hf, BLOCKS, Path(folder), dtype=torch.bfloat16)
            for part in (examine, late, saved, beside):
                results = part(hf, dims, recipe, Path(shared[0] if part is saved else folder))
                try:
                    found.update((f"{part.__name__}: {name}", is_right) for name, is_right in results)
                except Exception:
                    found[f"{part.__name__}: {traceback.format_exc()}"] = False
            dist.barrier()
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
