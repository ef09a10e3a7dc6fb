"""Loads into parameters in FP8, and exports of them, with a stand-in for TransformerEngine's parameters."""

import pytest
import torch
from torch import nn

import mcore_bridge as mb
from mcore_bridge.errors import ConfigError, ExportError
from mcore_bridge.trainers.wrap import wrap
from mcore_bridge.weights.files.hf_folder import Checkpoint
from tests.support import pool, quantized, stepping
from tests.support.exports import BUCKET, assert_exact
from tests.support.fp8_stand_in import BLOCK, quantize_linears
from tests.support.logs import messages_of
from tests.support.strategies import random_state, save, tiny

PUBLISHED = quantized.deepseek(BLOCK, rule=quantized.power_of_two)
OF_ANY_SCALE = quantized.deepseek(BLOCK)
MESHES = [mb.ParallelDims(), mb.ParallelDims(tp=2), mb.ParallelDims(tp=2, pp=2)]


def built(folder, dims, *, load):
    dims.initialize(device="cpu")
    return mb.build_model(folder, dims=dims, dtype=torch.bfloat16, device="cpu", load_weights=load)


def in_fp8(folder, dims, *, powers=True):
    """Chunks whose linear layers have parameters in FP8, with initial values; and these parameters."""
    models = built(folder, dims, load=False)
    return models, quantize_linears(models, powers=powers)


def load_and_export(dims, folder, how):
    """Parameters get what TransformerEngine makes of the loaded values, which are their first masters."""
    plain = built(folder, dims, load=True)
    state = mb.to_hf_state_dict(plain)
    models, held = in_fp8(folder, dims)
    source = {"folder": folder, "mapping": state, "pairs": state.items()}[how]
    report = mb.load_hf_weights(models, source, slot_bytes=1 << 10)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert name not in report.cast or report.cast[name].endswith(" -> StandIn")
    expected = quantize_linears(plain)
    assert len(held) == len(expected) > 0
    for own, other in zip(held, expected, strict=True):
        assert torch.equal(own.dequantize(), other.dequantize())
        assert torch.equal(own.get_high_precision_init_val(), other.get_high_precision_init_val())
    for chunk in plain:
        for module in chunk.decoder.modules():
            if "weight" in module._parameters and module.weight in set(expected):
                module.weight = nn.Parameter(module.weight.dequantize())
    rounded = mb.to_hf_state_dict(plain)
    assert_exact(mb.to_hf_state_dict(models, bucket_bytes=BUCKET), rounded)
    for shard in mb.iter_hf_shards(models):
        assert torch.equal(shard.tensor, rounded[shard.name][shard.index])
    is_exact = all(torch.equal(rounded[name], tensor) for name, tensor in state.items())
    return is_exact, mb.manifest(models, quantize="as_published", digests=True)


@pytest.mark.parametrize("dims", MESHES, ids=str)
@pytest.mark.parametrize("how", ["folder", "mapping", "pairs"])
def test_parameters_in_fp8_are_loaded_and_exported(dims, how, tmp_path):
    """bf16 values are rounded. Published codes with powers of two as scales leave as they came."""
    hf = tiny("qwen3")
    state = random_state(hf, dtype=torch.bfloat16)
    plain, published = tmp_path / "plain", tmp_path / "published"
    plain.mkdir()
    save(state, hf, plain)
    quantized.write(hf, PUBLISHED, published, dtype=torch.bfloat16)
    for folder, exactly in ((plain, False), (published, True)):
        for is_exact, manifest in pool.run(dims.model_size, load_and_export, dims, folder, how):
            assert is_exact == exactly
            assert exactly != bool(mb.Manifest.from_folder(folder, digests=True).differences(manifest))


def load_again(folder):
    """A part of the weights, then all of them after an optimizer has taken the first masters."""
    models, held = in_fp8(folder, mb.ParallelDims())
    mb.load_hf_weights(models, folder)
    before = mb.to_hf_state_dict(models)
    name = "model.layers.0.self_attn.k_proj.weight"
    mb.load_hf_weights(models, {name: -before[name]}, strict=False)
    after = mb.to_hf_state_dict(models)
    assert [each for each in before if not torch.equal(before[each], after[each])] == [name]
    assert torch.equal(after[name], -before[name])
    for parameter in held:
        del parameter._high_precision_init_val
    with messages_of() as messages:
        mb.load_hf_weights(models, folder)
    assert_exact(mb.to_hf_state_dict(models), before)
    held[0]._codes.untyped_storage().resize_(0)
    with pytest.raises(ExportError, match=r"weight has no storage"):
        mb.to_hf_state_dict(models)
    return len(held), messages


def test_a_load_after_an_optimizer_was_made_says_that_masters_are_old(tmp_path):
    quantized.write(tiny("qwen3"), PUBLISHED, tmp_path, dtype=torch.bfloat16)
    ((count, messages),) = pool.run(1, load_again, tmp_path)
    assert [f"the {count} parameters in FP8" in message for message in messages] == [True]
    assert "reload_model_params()" in messages[0]


def save_and_load(folder, target):
    """A checkpoint has values of bf16. A model reads it on another mesh, also into parameters in FP8."""
    with stepping.mesh(mb.ParallelDims(tp=2)):
        models, _ = in_fp8(folder, mb.ParallelDims(tp=2))
        mb.load_hf_weights(models, folder)
        state = mb.to_hf_state_dict(models)
        mb.save_checkpoint(models, target)
    dims = mb.ParallelDims(pp=2)
    with stepping.mesh(dims):
        plain = built(target, dims, load=False)
        mb.load_checkpoint(plain, target)
        assert_exact(mb.to_hf_state_dict(plain), state)
        models, held = in_fp8(target, dims)
        mb.load_checkpoint(models, target)
        assert_exact(mb.to_hf_state_dict(models), state)
        for parameter in held:
            assert torch.equal(parameter.get_high_precision_init_val(), parameter.dequantize())
            del parameter._high_precision_init_val
        with messages_of() as messages:
            mb.load_checkpoint(models, target)
        assert [f"the {len(held)} parameters in FP8" in message for message in messages] == [True]


def test_a_checkpoint_of_parameters_in_fp8_is_read_on_another_mesh(tmp_path):
    hf = tiny("qwen3")
    save(random_state(hf, dtype=torch.bfloat16), hf, tmp_path)
    pool.run(2, save_and_load, tmp_path, tmp_path / "saved")


def load_below_a_value_head(folder):
    """A value head is no layer of TransformerEngine, and stays in bf16."""
    mb.ParallelDims().initialize(device="cpu")
    models = mb.build_model(folder, dtype=torch.bfloat16, device="cpu", load_weights=False, head="value")
    held, head = quantize_linears(models), models[0].output_layer.weight
    before = head.detach().clone()
    assert mb.load_hf_weights(models, folder).initialised == ("score.weight",)
    found, expected = mb.to_hf_state_dict(models), mb.to_hf_state_dict(built(folder, mb.ParallelDims(), load=True))
    assert torch.equal(found.pop("score.weight"), before)
    assert_exact(found, {name: tensor for name, tensor in expected.items() if name != "lm_head.weight"})
    assert len(held) > 3


def test_parameters_in_fp8_are_loaded_below_a_value_head(tmp_path):
    quantized.write(tiny("qwen3"), PUBLISHED, tmp_path, dtype=torch.bfloat16)
    pool.run(1, load_below_a_value_head, tmp_path)


def wrap_without_a_gather(folder):
    from megatron.core.distributed import DistributedDataParallelConfig

    chunks, _ = in_fp8(folder, mb.ParallelDims())
    with pytest.raises(ConfigError, match="fp8_param_gather must be True"):
        wrap(chunks, DistributedDataParallelConfig(use_distributed_optimizer=True))


def test_parameters_that_no_optimizer_would_write_are_refused(tmp_path):
    quantized.write(tiny("qwen3"), PUBLISHED, tmp_path, dtype=torch.bfloat16)
    pool.run(1, wrap_without_a_gather, tmp_path)


def load_codes(folder, dims, powers):
    """What a load of published FP8 blocks says, and for each weight whether the codes of the file leave again."""
    models, held = in_fp8(folder, dims, powers=powers)
    with messages_of() as messages:
        mb.load_hf_weights(models, folder)
    assert [f"{len(held)} parameters lost the codes" in message for message in messages] == [True] * powers
    found, files = mb.to_hf_state_dict(models, quantize="as_published"), Checkpoint(folder)
    codes = [name for name, tensor in files.items() if tensor.dtype == torch.float8_e4m3fn]
    if not powers:
        for name in (f"{name}_scale_inv" for name in codes):
            torch.testing.assert_close(found[name], files[name], rtol=2**-8, atol=0)
    return [torch.equal(found[name].float(), files[name].float()) for name in codes]


@pytest.mark.parametrize("dims", [mb.ParallelDims(), mb.ParallelDims(tp=2)], ids=str)
def test_a_load_says_whether_published_codes_are_lost(dims, tmp_path):
    """Powers of two give other codes than scales of any value. Scales of any value give the codes of the file again."""
    quantized.write(tiny("qwen3"), OF_ANY_SCALE, tmp_path, dtype=torch.bfloat16)
    for powers in (True, False):
        for is_kept in pool.run(dims.model_size, load_codes, tmp_path, dims, powers):
            assert is_kept
            assert set(is_kept) == {not powers}
