"""A model that NVIDIA's ModelOpt fake-quantizes (QAT) leaves in NVFP4, with the bits of ModelOpt's own functions.

ModelOpt must be installed, as docs/guide/quantized.md says. verl exports a QAT in this way.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import mcore_bridge as mb
from mcore_bridge.errors import ConfigError
from tests.support import pool
from tests.support.modelopt import NOTE, fake_quantized
from tests.support.strategies import random_state, tiny

pytestmark = pytest.mark.skipif(importlib.util.find_spec("modelopt") is None, reason="ModelOpt is not installed")
PARTS = {
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
}


def theirs(weight: Tensor, module: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and scales of a weight by ModelOpt, with the largest magnitude that the quantizer of a module has seen."""
    from modelopt.torch.export.quant_utils import get_quantization_format, to_quantized_weight
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    overall = module.weight_quantizer._amax.float() / (6 * 448)
    scales, _ = NVFP4QTensor.get_weights_scaling_factor(weight, 16, weights_scaling_factor_2=overall)
    return to_quantized_weight(weight, scales, get_quantization_format(module), overall, 16), scales, overall


def differing(models: Any) -> list[str]:
    """The weights whose codes and scales are not ModelOpt's."""
    plain, ours = mb.to_hf_state_dict(models), mb.to_hf_state_dict(models, quantize=NOTE)
    assert len(ours) == len(plain) + 2 * 7 * 4  # of seven weights in each of four layers
    wrong = []
    for name, module in models[0].named_modules():
        kind = next((kind for kind in PARTS if name.endswith(kind)), None)
        for part in PARTS[kind] if kind else ():
            own = f"model.layers.{name.split('.')[2]}.{part}.weight"
            sent = (ours[own], ours[f"{own}_scale"], ours[f"{own}_scale_2"])
            made = theirs(plain[own], module)
            wrong += [own for a, b in zip(sent, made, strict=True) if not same(a, b)]
    return wrong


def compared(folder: str) -> list[str]:
    """In a worker: the tensors whose bits differ from ModelOpt's, and what does not come back."""
    dims = mb.ParallelDims()
    dims.initialize(device="cpu")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    models = mb.build_model(tiny("qwen3", **sizes), dims=dims, dtype=torch.bfloat16, device="cpu", load_weights=False)
    before = mb.to_hf_state_dict(models)
    fake_quantized(models[0])
    plain = mb.to_hf_state_dict(models)
    wrong = [name for name in before if not torch.equal(before[name], plain[name])]
    wrong += differing(models)
    for parameter in models[0].parameters():  # a step beyond what the quantizers saw
        parameter.data.mul_(1.25).add_(0.1 * torch.randn_like(parameter) * parameter.detach().abs())
    wrong += differing(models)
    before = mb.to_hf_state_dict(models)
    mb.save_checkpoint(models, folder)
    for parameter in models[0].parameters():
        parameter.data.zero_()
    mb.load_checkpoint(models, folder)
    after = mb.to_hf_state_dict(models)
    return wrong + [name for name in before if not torch.equal(before[name], after[name])]


def by_verl(dims: mb.ParallelDims, folder: str) -> dict[str, Tensor]:
    """Runs in a worker: verl's steps of a QAT in which the attention's output stays plain, and what leaves."""
    from mcore_bridge.trainers.megatron_bridge import AutoBridge
    from mcore_bridge.trainers.provider import modelopt_transformer_layer_spec
    from mcore_bridge.trainers.verl.replacements import export_qat_weights

    dims.initialize(device="cpu")
    bridge = AutoBridge.from_hf_pretrained(folder)
    provider: Any = bridge.to_megatron_provider(load_weights=True)
    provider.transformer_layer_spec = modelopt_transformer_layer_spec
    sizes = {"tensor": dims.tp, "pipeline": dims.pp, "expert": dims.ep}
    fields = {f"{name}_model_parallel_size": size for name, size in sizes.items()}
    provider.apply_overrides_and_finalize(torch.bfloat16, {**fields, "sequence_parallel": dims.sp})
    models = provider.provide_distributed_model(wrap_with_ddp=False, bf16=True)
    for chunk in models:
        fake_quantized(chunk, "*linear_proj*")
    pairs = export_qat_weights(bridge.export_hf_weights(models), models, "w4a16", bridge)
    return {name: octets(tensor) for name, tensor in pairs}


def octets(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, which another process can be sent in any dtype."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def same(tensor: Tensor, other: Tensor) -> bool:
    """Whether all bits are equal."""
    return torch.equal(octets(tensor), octets(other))


def test_a_model_in_qat_leaves_with_the_bits_of_modelopt(tmp_path: Path) -> None:
    assert pool.run(1, compared, str(tmp_path)) == [[]]


def refused(dims: mb.ParallelDims, folder: str) -> list[str]:
    """Runs in a worker: why a model cannot leave as it is trained, for quantizers of other kinds on rank 0 alone."""
    import modelopt.torch.quantization as mtq

    from mcore_bridge.trainers.nemo_rl import qat_format

    dims.initialize(device="cpu")
    found = []
    for config in (None, mtq.FP8_DEFAULT_CFG, "inputs", "router"):
        models = mb.build_model(folder, dims=dims, dtype=torch.bfloat16, device="cpu", load_weights=False)
        if torch.distributed.get_rank() == 0 and config is not None:
            if isinstance(config, str):
                fake_quantized(models[0])
            else:
                mtq.quantize(models[0], config)
        layer: Any = models[0].decoder.layers[0]
        if config == "inputs" and torch.distributed.get_rank() == 0:
            layer.mlp.experts.local_experts[1].linear_fc2.input_quantizer.enable()
        if config == "router" and torch.distributed.get_rank() == 0:
            layer.mlp.router.weight_quantizer = layer.self_attention.linear_proj.weight_quantizer
        with pytest.raises(ConfigError) as error:
            qat_format(models)
        found.append(str(error.value).partition(" found ")[2])
    return found


def test_quantizers_that_nvfp4_does_not_have_are_named_on_every_rank(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    tiny("qwen3_moe", **sizes).save_pretrained(tmp_path)
    nothing, fp8, inputs, router = pool.run(1, refused, mb.ParallelDims(), str(tmp_path))[0]
    assert nothing.startswith("no quantizer. Change")
    assert fp8.startswith("model.layers.0.mlp.experts.0.down_proj.weight: num_bits=(4, 3), block_sizes={}; model")
    assert inputs.startswith("model.layers.0.mlp.experts.1.down_proj.weight: its input_quantizer is enabled (1 in all")
    assert router.startswith("model.layers.0.mlp.gate.weight: it cannot leave in NVFP4 (1 in all). Change")
    first, second = pool.run(2, refused, mb.ParallelDims(pp=2), str(tmp_path))
    assert first == second
    assert [first[0], *first[2:]] == [nothing, inputs, router]


class Grouped(torch.nn.Module):
    """A grouped layer of two experts, as far as quantizers see it."""

    def __init__(self, quantizers: Any) -> None:
        super().__init__()
        self.weight0, self.weight1 = (torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(2))
        self.weight_quantizer = quantizers


def of_grouped_layers(folder: str) -> dict[str, float]:
    """In a worker: the ranges of a layer of TransformerEngine with an own quantizer for each expert."""
    from modelopt.torch.quantization.nn import TensorQuantizer
    from modelopt.torch.quantization.nn.modules.tensor_quantizer import GroupedQuantizer

    from mcore_bridge.weights.model_tensors import ranges_of_quantizers

    mb.ParallelDims().initialize(device="cpu")
    models = mb.build_model(folder, device="cpu", load_weights=False)
    quantizers = [TensorQuantizer() for _ in range(2)]
    for number, quantizer in enumerate(quantizers):
        quantizer.amax = torch.tensor(number + 1.0)
    layer: Any = models[0].decoder.layers[1]
    layer.mlp.experts.linear_fc1 = Grouped(GroupedQuantizer(*quantizers))
    return {name: float(amax) for name, amax in ranges_of_quantizers(models).items()}


def test_each_expert_of_a_grouped_layer_has_its_own_quantizer(tmp_path: Path) -> None:
    tiny("qwen3_moe").save_pretrained(tmp_path)
    expected = {f"decoder.layers.1.mlp.experts.{n}.linear_fc1.weight": n + 1.0 for n in range(2)}
    assert pool.run(1, of_grouped_layers, str(tmp_path)) == [expected]


MESHES = {
    "TP2": mb.ParallelDims(tp=2),
    "PP2": mb.ParallelDims(pp=2),
    "EP2": mb.ParallelDims(ep=2),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_a_qat_of_verl_leaves_in_nvfp4_from_every_mesh(mesh: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    kind, dims = "qwen3", MESHES[mesh]
    if dims.ep > 1:
        kind, sizes = "qwen3_moe", {**sizes, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    hf = tiny(kind, **sizes)
    folder, state = str(tmp_path), random_state(hf, dtype=torch.bfloat16)
    hf.save_pretrained(folder)
    save_file(state, tmp_path / "model.safetensors")
    (alone,) = pool.run(1, by_verl, mb.ParallelDims(), folder)
    encoded = {name for name in state if f"{name}_scale" in alone}
    assert encoded == {name for name in state if "_proj." in name and "o_proj" not in name}
    assert all(same(state[name], alone[name]) for name in state.keys() - encoded)
    for found in pool.run(2, by_verl, dims, folder):
        assert found.keys() == alone.keys()
        assert not [name for name in alone if not same(alone[name], found[name])]
