"""SGLang's loader of adapters loads ours, from folders and as tensors; its adapters add what a merge adds.

SGLang must be installed, as in docs/trainers/sglang.md.
"""

import hashlib
import importlib.util
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import mcore_bridge as mb
from tests.support import tiny
from tests.support.stepping import leave_mesh
from tests.workers import sglang_engine
from tests.workers.rollout_families import configs

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")

RANK = 4
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@pytest.fixture(autouse=True, scope="module")
def alone():
    """The trainer is this process."""
    mb.ParallelDims().initialize(device="cpu")
    yield
    leave_mesh()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_holds_what_a_merge_adds(family, tmp_path):
    hf = configs()[family]
    tiny.random_checkpoint(hf, tmp_path / "base")
    models = mb.build_model(tmp_path / "base", dims=mb.ParallelDims(), device="cpu", dtype=torch.float32)
    mb.add_adapters(models, rank=RANK, alpha=10, targets=TARGETS, expert_format="split")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in (parameter for chunk in models for parameter in chunk.parameters() if parameter.requires_grad):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    mb.save_hf_adapters(models, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    tensors = dict(mb.iter_hf_adapters(models))
    with sglang_engine.server(str(tmp_path / "base")):
        from_folder, from_tensors = loader(hf, path=str(tmp_path / "adapter")), loader(hf, config_dict=config)
        from_folder.initialize_weights()
        from_tensors.initialize_weights_from_tensors(tensors)

    merged, base = (mb.to_hf_state_dict(models, expert_format="split", merged=merged) for merged in (True, False))
    added = {name: merged[name] - base[name] for name in base if not torch.equal(merged[name], base[name])}
    for found in from_folder, from_tensors:
        held = dict(deltas(found, base))
        assert held.keys() == added.keys(), held.keys() ^ added.keys()
        for name, delta in held.items():
            torch.testing.assert_close(
                delta, added[name], rtol=0, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
            )
    files = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    said = {f"base_model.model.{name}": checksum(tensor) for name, tensor in tensors.items()}
    assert said == {name: checksum(tensor) for name, tensor in files.items()}, "what expected_checksums compares"


def loader(hf, **config):
    """SGLang's adapter without a server. Loading makes no call to the backend."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.lora.lora_config import LoRAConfig

    return LoRAAdapter("trained", LoRAConfig(**config), hf, LoadConfig(), SimpleNamespace())


def deltas(adapter, base):
    """The name of each adapted weight, and what SGLang would add to it: of each part of a fused one its own A and B."""
    for layer in adapter.layers:
        for name, second in layer.weights.items():
            if ".lora_B" not in name:
                continue
            first = layer.weights[name.replace("lora_B", "lora_A")]
            module = name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
            path, _, last = module.rpartition(".")
            parts = [f"{path}.{part}.weight" for part in FUSED.get(last, (last,))]
            rows = second.split([len(base[part]) for part in parts])
            for part, a, b in zip(parts, first.split(RANK), rows, strict=True):
                yield part, adapter.scaling * b.double().matmul(a.double()).float()


def checksum(tensor):
    """The checksum, as SGLang computes it."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
