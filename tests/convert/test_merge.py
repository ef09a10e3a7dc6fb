"""``merge``: an HF folder with the bits of ``peft``'s merge in fp64; all other tensors are unchanged."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_bridge.convert.convert import convert, merge
from mcore_bridge.errors import BridgeError
from mcore_bridge.weights.files.hf_folder import Checkpoint
from mcore_bridge.weights.manifest import Manifest
from tests import zoo
from tests.support import experts, quantized, tiny
from tests.support.command import run
from tests.support.peft_merges import merged as merged_by_peft
from tests.support.peft_models import EXPERTS

FP8 = {"quant_method": "fp8", "weight_block_size": [8, 16]}
DENSE = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")


def split(state):
    """The tensors of ``state``, with a tensor for each expert."""
    parts = {}
    for name, tensor in state.items():
        head, _, kind = name.rpartition(".experts.")
        if not head:
            parts[name] = tensor
            continue
        kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        for number, whole in enumerate(tensor):
            for own, part in zip(kinds, whole.chunk(len(kinds)), strict=True):
                parts[f"{head}.experts.{number}.{own}.weight"] = part.contiguous()
    return parts


def write(state, hf, folder):
    """A base with a tensor that no model uses, a tokenizer, and other files."""
    folder.mkdir()
    state = {**state, "rotary.inv_freq": torch.arange(3.0)}
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    hf.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return state


def check(folder, state, merged):
    found = dict(Checkpoint(folder).items())
    assert found.keys() == state.keys()
    assert all(torch.equal(tensor, merged.get(name, state[name])) for name, tensor in found.items())
    assert sum(not torch.equal(tensor, state[name]) for name, tensor in found.items()) >= 4
    assert (folder / "tokenizer.json").is_file()


def assert_encoded_later(folder):
    """The merge that encoded has the bits of a conversion of the plain merge."""
    convert(folder / "out", folder / "later", plain=True, quantize=FP8, on_event=lambda *event: None)
    at_once, later = (Manifest.from_folder(folder / name, digests=True) for name in ("fp8", "later"))
    assert at_once.differences(later) == ()
    assert (folder / "fp8" / "config.json").read_text() == (folder / "later" / "config.json").read_text()


def test_the_bits_are_those_of_peft_in_fp64(tmp_path):
    hf = tiny.config("llama")
    *_, base, merged = merged_by_peft(hf, DENSE, torch.bfloat16, tmp_path / "adapter")
    state = write(base, hf, tmp_path / "base")
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", file_bytes=1 << 15, on_event=lambda *event: None)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    check(tmp_path / "out", state, merged)
    finished = run("merge", tmp_path / "base", tmp_path / "adapter", tmp_path / "again")
    assert "parameters in 56 tensors" in finished.stdout
    check(tmp_path / "again", state, merged)
    finished = run("merge", tmp_path / "base", tmp_path / "adapter", tmp_path / "fp8", "--quantize", json.dumps(FP8))
    assert "weights are encoded as float8_e4m3fn[8x16]" in " ".join(finished.stdout.split())
    assert_encoded_later(tmp_path)


@pytest.mark.skipif(not zoo.NEWEST, reason="transformers 4 has a module for each expert")
@pytest.mark.parametrize("spelled", [dict, split], ids=["fused", "split"])
def test_files_may_hold_experts_in_the_other_format(spelled, tmp_path):
    *_, base, merged = merged_by_peft(experts.HF, ("q_proj", *EXPERTS), torch.float32, tmp_path / "adapter")
    state = write(spelled(base), experts.HF, tmp_path / "base")
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", on_event=lambda *event: None)
    check(tmp_path / "out", state, spelled(merged))
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "fp8", quantize=FP8, on_event=lambda *event: None)
    assert_encoded_later(tmp_path)


@pytest.mark.parametrize("name", ["gpt_oss", "llama4", "qwen3_vl_moe"])
def test_experts_that_are_in_out_are_merged_by_the_transpose(name, tmp_path):
    """The files of Qwen3-VL are written by transformers 5, so experts are transposed relative to the rules."""
    if not zoo.NEWEST:
        pytest.skip("peft takes them as transformers 5 holds them")
    hf = zoo.cases()[name].hf
    *_, base, merged = merged_by_peft(hf, EXPERTS, torch.bfloat16, tmp_path / "adapter")
    state = write(base, hf, tmp_path / "base")
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", on_event=lambda *event: None)
    check(tmp_path / "out", state, merged)


def test_what_does_not_fit_is_named(tmp_path):
    hf = tiny.config("llama")
    *_, base, _ = merged_by_peft(hf, DENSE, torch.bfloat16, tmp_path / "adapter")
    write({name: tensor for name, tensor in base.items() if "layers.1.mlp.down" not in name}, hf, tmp_path / "base")
    weights, config = tmp_path / "adapter" / "adapter_model.safetensors", tmp_path / "adapter" / "adapter_config.json"

    def refused(match, base="base", target="out"):
        with pytest.raises(BridgeError, match=match):
            merge(tmp_path / base, tmp_path / "adapter", tmp_path / target, on_event=lambda *event: None)
        assert not list(tmp_path.glob("out/*.safetensors"))

    refused(r"lacks 1 tensor with adapters, such as \['model.layers.1.mlp.down_proj.weight'\]")
    refused("is both source and target", target="adapter")
    tensors = load_file(weights)
    a, b = (f"base_model.model.model.layers.0.self_attn.{name}.weight" for name in ("o_proj.lora_A", "q_proj.lora_B"))
    twice = {b: tensors[b].repeat(2, 1), a: tensors[a][:, :-1].contiguous()}
    write(base, hf, tmp_path / "whole")
    save_file({**tensors, **twice}, weights)
    refused(r"o_proj.lora_A.* has 111 columns, and its weight takes 112; .*q_proj.lora_B.* has 224 rows, and", "whole")
    save_file({name: tensor for name, tensor in tensors.items() if "0.mlp.up_proj.lora_B" not in name}, weights)
    refused(r"lacks \['model.layers.0.mlp.up_proj.lora_B.weight'\]: save it again")
    config.write_text(json.dumps({**json.loads(config.read_text()), "use_dora": True}))
    refused("use_dora")
    quantized.write(hf, quantized.deepseek((8, 8), torch.bfloat16), tmp_path / "fp8", dtype=torch.bfloat16)
    refused(r"fp8 has quantized weights, expected plain ones: convert it with --to hf first", "fp8")
