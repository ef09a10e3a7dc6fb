"""Converts quantized HF folders to plain folders, and to checkpoints of megatron-core."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mcore_bridge.commands.app import app
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.convert.convert import convert
from mcore_bridge.convert.hf_to_torch import rank_files
from mcore_bridge.convert.rank_files.rank_folder import iter_mg_weights
from mcore_bridge.errors import BridgeError, CheckpointError, ConfigError
from mcore_bridge.trainers.rlinf.convertor import convert_hf_to_mg
from mcore_bridge.weights.dist_checkpoint.folder import TorchDistFolder
from mcore_bridge.weights.files.hf_folder import Checkpoint
from mcore_bridge.weights.manifest import Manifest
from tests import zoo
from tests.support import mtp_checkpoints, quantized
from tests.support.conversions import StoppedError, assert_exact, quiet, stop_half_way, written
from tests.support.rlinf_files import PLAIN, asked
from tests.support.strategies import random_state, save, tiny
from tests.support.twins import read

FORMS: dict[str, tuple[Any, quantized.Format]] = {
    "kimi_k2": (None, quantized.int4(8)),
    "qwen3_moe": (None, quantized.deepseek((8, 8), torch.bfloat16)),
    "gpt_oss": (64, quantized.mxfp4()),
    "deepseek_v4": (64, quantized.deepseek_v4()),
    "llama": (None, replace(quantized.nvfp4("modelopt"), note={"quant_algo": "W4A16_NVFP4"})),
}


def source(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A quantized folder: its files, and their decoded values."""
    width, form = FORMS[name]
    if name == "kimi_k2":
        hf = read("kimi_k2", zoo.described()["deepseek_v3"].hf.to_dict())
        return quantized.write(hf, form, folder, dtype=torch.bfloat16)
    if name not in zoo.cases():
        pytest.skip("the installed transformers lacks it")
    fields = dict(zoo.cases()[name].fields) if name != "llama" else {}
    if width:
        fields |= {"hidden_size": width, "intermediate_size": 32}
    return quantized.write(tiny(name, **fields), form, folder, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", FORMS)
def test_a_quantized_folder_becomes_plain(name: str, tmp_path: Path) -> None:
    """Other files of the folder are copied. Tensors go to several files, and no model is built."""
    files, plain = source(name, tmp_path / "quantized")
    (tmp_path / "quantized" / "tokenizer.json").write_text("{}")
    (tmp_path / "quantized" / "hf_quant_config.json").write_text("{}")
    converted = convert(tmp_path / "quantized", tmp_path / "plain", plain=True, file_bytes=30_000, on_event=quiet)
    assert_exact(tmp_path / "plain", plain)
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert not config.keys() & {"quantization_config", "expert_dtype"}
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"
    assert (tmp_path / "plain" / "tokenizer.json").is_file()
    assert not (tmp_path / "plain" / "hf_quant_config.json").exists()
    assert len(converted.conversion.names) > 1
    assert set(converted.conversion.ignored) == {each for each in files if each.endswith(".input_scale")}


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.write_text("[]"), lambda path: None])
def test_a_config_that_is_no_object_is_refused(make: Callable[[Path], Any], tmp_path: Path) -> None:
    """Reading a FIFO would wait forever."""
    source("llama", tmp_path)
    (tmp_path / "config.json").unlink()
    make(tmp_path / "config.json")
    with pytest.raises(
        ConfigError,
        match=r"is a FIFO, expected|must hold a (JSON object|config\.json), found",
    ):
        convert(tmp_path, tmp_path / "plain", plain=True, on_event=quiet)


def test_it_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    _, plain = source("qwen3_moe", tmp_path / "quantized")
    arguments: dict[str, Any] = {"plain": True, "file_bytes": 10_000}
    with pytest.raises(StoppedError):
        convert(tmp_path / "quantized", tmp_path / "plain", on_event=stop_half_way, **arguments)
    assert not (tmp_path / "plain" / "config.json").exists()
    assert convert(tmp_path / "quantized", tmp_path / "plain", on_event=quiet, **arguments).num_kept > 0
    assert_exact(tmp_path / "plain", plain)
    arguments |= {"quantize": tmp_path / "quantized"}
    with pytest.raises(StoppedError):
        convert(tmp_path / "plain", tmp_path / "encoded", on_event=stop_half_way, **arguments)
    other = {**arguments, "quantize": {"quant_method": "fp8", "weight_block_size": [8, 8]}}
    with pytest.raises(StoppedError):
        convert(tmp_path / "plain", tmp_path / "encoded", on_event=stop_half_way, **other)
    assert convert(tmp_path / "plain", tmp_path / "encoded", on_event=quiet, **arguments).num_kept == 0
    with pytest.raises(CheckpointError, match="has no quantized weights, expected some"):
        convert(tmp_path / "plain", tmp_path / "again", plain=True, on_event=quiet)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "kimi_k2"])
def test_a_quantized_folder_becomes_one_of_megatron_core_and_is_published_again(name: str, tmp_path: Path) -> None:
    """Plain weights that come back in the format of the folder have all its bits, and so has its config."""
    _, plain = source(name, tmp_path / "quantized")
    convert(tmp_path / "quantized", tmp_path / "dist", on_event=quiet)
    convert(tmp_path / "dist", tmp_path / "back", on_event=quiet)
    assert_exact(tmp_path / "back", plain)
    for folder in ("dist", "back"):
        assert "quantization_config" not in json.loads((tmp_path / folder / "config.json").read_text())
    published = Manifest.from_folder(tmp_path / "quantized", digests=True)
    described = json.loads((tmp_path / "quantized" / "config.json").read_text())
    for folder, options in (
        ("dist", {"hf": tmp_path / "quantized", "quantize": "as_published", "num_processes": 2}),
        ("back", {"plain": True, "quantize": tmp_path / "quantized"}),
        ("quantized", {"plain": True, "quantize": "as_published"}),
    ):
        target = tmp_path / f"from {folder}"
        written = convert(tmp_path / folder, target, on_event=quiet, file_bytes=30_000, **options)
        assert published.differences(Manifest.from_folder(target, digests=True)) == ()
        assert sum(written.conversion.sizes) == published.num_bytes
        assert sum(written.conversion.numels) == sum(tensor.numel() for tensor in plain.values())
        assert len(written.conversion.numels) == len(published)
        config = json.loads((target / "config.json").read_text())
        assert [config[key] for key in ("quantization_config", "num_hidden_layers")] == [
            described[key] for key in ("quantization_config", "num_hidden_layers")
        ]
        assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_codes_are_decoded_to_the_dtype_of_the_config(dtype: torch.dtype, tmp_path: Path) -> None:
    """In an earlier version codes counted as bf16, so a folder in float16 was refused."""
    hf = tiny("llama")
    hf.dtype = dtype
    quantized.write(hf, quantized.deepseek((8, 8), torch.float32), tmp_path / "quantized", dtype=dtype)
    convert(tmp_path / "quantized", tmp_path / "dist", on_event=quiet)
    convert(tmp_path / "quantized", tmp_path / "plain", plain=True, on_event=quiet)
    found = TorchDistFolder.open(tmp_path / "dist").tensors.values()
    assert {tensor.properties.dtype for tensor in found} == {dtype}
    assert {spec.dtype for spec in Manifest.from_folder(tmp_path / "plain")} == {dtype}


def test_what_repeats_the_head_in_mtp_layers_has_its_dtype(tmp_path: Path) -> None:
    """A checkpoint in fp32 leaves in the format of a folder whose MTP layers have plain copies of two tensors."""
    hf, form = mtp_checkpoints.config("deepseek_v3"), quantized.deepseek((16, 16))
    hf.num_nextn_predict_layers = 1
    own = {name: tensor.clone() for name, tensor in mtp_checkpoints.published(hf).items()}
    convert(written(own, hf, tmp_path / "fp32"), tmp_path / "dist", on_event=quiet)
    state = {name: t if name.endswith("bias") else t.to(torch.bfloat16) for name, t in own.items()}
    plain = {name: t for name, t in state.items() if name.endswith(("shared_head.head.weight", "embed_tokens.weight"))}
    files = {name: t for name, t in form.files(state).items() if not name.startswith(tuple(plain))}
    hf.quantization_config = form.note
    folder = written(files | plain, hf, tmp_path / "fp8")
    assert len(plain) == 3
    convert(tmp_path / "dist", tmp_path / "back", hf=folder, quantize="as_published", on_event=quiet)
    assert Manifest.from_folder(folder).differences(Manifest.from_folder(tmp_path / "back")) == ()


def test_a_description_encodes_as_on_a_mesh(tmp_path: Path) -> None:
    """A save on a mesh is held to the same oracle."""
    form = quantized.deepseek((8, 8))
    hf = tiny("qwen3_moe", **zoo.cases()["qwen3_moe"].fields)
    state = random_state(hf, dtype=torch.bfloat16)
    (tmp_path / "plain").mkdir()
    save(state, hf, tmp_path / "plain")
    (tmp_path / "published").mkdir()
    save(form.files(state), hf, tmp_path / "published")
    published = Manifest.from_folder(tmp_path / "published", digests=True)
    convert(tmp_path / "plain", tmp_path / "dist", on_event=quiet)
    mesh = rank_files("torch", ParallelDims(tp=2, ep=2), "torch")
    convert(tmp_path / "plain", tmp_path / "ranks", rank_files=mesh, on_event=quiet)
    for folder in ("plain", "dist", "ranks"):
        options = {"plain": folder == "plain", "hf": None if folder == "plain" else tmp_path / "plain"}
        convert(tmp_path / folder, tmp_path / f"from {folder}", quantize=form.note, on_event=quiet, **options)
        assert published.differences(Manifest.from_folder(tmp_path / f"from {folder}", digests=True)) == ()
        note = json.loads((tmp_path / f"from {folder}" / "config.json").read_text())["quantization_config"]
        listed = note.pop("modules_to_not_convert")
        assert note == form.note
        assert {module for module in listed if "norm" not in module} == {
            name.removesuffix(".weight")
            for name, tensor in state.items()
            if tensor.dim() > 1 and not form.is_quantized(name, tensor)
        }


def test_transformers_finds_all_of_a_model_with_a_tied_head(tmp_path: Path) -> None:
    """The description has only what is needed. No file has a tied head, but transformers makes a module of it."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    hf = tiny("qwen3", tie_word_embeddings=True)
    save(random_state(hf, dtype=torch.bfloat16), hf, tmp_path)
    note = {"quant_method": "compressed-tensors", "config_groups": {"all": {"weights": quantized.ROWS}}}
    convert(tmp_path, tmp_path / "encoded", plain=True, quantize=note, on_event=quiet)
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "encoded", dtype=torch.bfloat16, output_loading_info=True
    )
    assert {key: value for key, value in report.items() if value} == {}
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_conversion_that_cannot_encode_says_what_to_use(tmp_path: Path) -> None:
    source("qwen3_moe", tmp_path / "quantized")
    source("llama", tmp_path / "other")
    convert(tmp_path / "quantized", tmp_path / "plain", plain=True, on_event=quiet)
    convert(tmp_path / "plain", tmp_path / "dist", on_event=quiet)
    note = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    for folder, said, options in (
        ("plain", "pass --to hf", {"quantize": note}),
        ("plain", "found plain ones in .*pass the folder of a quantized release", {"quantize": "as_published"}),
        ("plain", "tensors that this export does not have", {"quantize": tmp_path / "other"}),
        ("plain", "shorten its list", {"quantize": {**note, "modules_to_not_convert": ["layers"]}}),
        ("dist", "found none in .*--hf for as_published", {"quantize": "as_published"}),
    ):
        plain = folder == "plain" and "to hf" not in said
        with pytest.raises(BridgeError, match=said):
            convert(tmp_path / folder, tmp_path / "target", plain=plain, on_event=quiet, **options)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(("name", "plain"), [("qwen3_moe", True), ("gpt_oss", False)])
def test_several_processes_write_the_same_bytes(name: str, plain: bool, tmp_path: Path) -> None:
    source(name, tmp_path / "quantized")
    options: dict[str, Any] = {"plain": plain, "file_bytes": 30_000, "on_event": quiet}
    rounds = [("quantized", "one", None)]
    rounds += [("one", "encoded", {"quant_method": "fp8", "weight_block_size": [8, 8]})] if plain else []
    for given, target, quantize in rounds:
        for processes in (2, 1):
            folder = tmp_path / (target if processes == 1 else "two")
            converted = convert(tmp_path / given, folder, num_processes=processes, quantize=quantize, **options)
            assert len(converted.conversion.names) > 2
        one, two = (
            {path.name: path.read_bytes() for path in (tmp_path / folder).rglob("*.*") if path.name != ".metadata"}
            for folder in (target, "two")  # torch writes a random number into it
        )
        assert one
        assert one == two
        shutil.rmtree(tmp_path / "two")


def test_files_for_rlinf_are_plain(tmp_path: Path) -> None:
    _, plain = source("qwen3_moe", tmp_path / "quantized")
    convert_hf_to_mg(str(tmp_path / "quantized"), asked(tmp_path / "mg", tp=2, ep=2, **PLAIN))
    found = dict(iter_mg_weights(tmp_path / "mg", tmp_path / "mg"))
    assert found.keys() == plain.keys()
    assert [name for name in found if not torch.equal(found[name], plain[name])] == []
    assert "quantization_config" not in json.loads((tmp_path / "mg" / "config.json").read_text())


def test_the_command_writes_plain_folders(tmp_path: Path) -> None:
    files, plain = source("llama", tmp_path / "quantized")
    found = CliRunner().invoke(app, ["convert", str(tmp_path / "quantized"), str(tmp_path / "plain"), "--to", "hf"])
    assert found.exit_code == 0, found.output
    assert "is written as hf" in " ".join(found.output.split())
    assert Checkpoint(tmp_path / "plain").keys() == plain.keys()
    for number, form in enumerate((tmp_path / "quantized", tmp_path / "quantized" / "config.json", "{")):
        asked = ("convert", tmp_path / "plain", tmp_path / f"{number}", "--to", "hf", "--quantize", form)
        found = CliRunner().invoke(app, list(map(str, asked)))
        said = " ".join(found.output.split())
        assert (
            "weights are encoded as nvfp4[1x16]" if number < 2 else "must be JSON if it begins with a brace"
        ) in said
    both = (Manifest.from_folder(tmp_path / folder, digests=True) for folder in ("quantized", "0"))
    assert next(both).differences(next(both)) == ()
    assert {name for name in files if name.endswith(".input_scale")} == files.keys() - Checkpoint(tmp_path / "1").keys()
