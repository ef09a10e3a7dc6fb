"""Quantized checkpoints as they are published, decoded bit by bit like transformers or the publisher's code."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import mcore_bridge as mb
from mcore_bridge.architecture import read_hf
from mcore_bridge.config.quantization import read_quantization
from mcore_bridge.errors import CheckpointError, ConfigError
from mcore_bridge.rules.encoded import Encoded, EncodedSlice
from mcore_bridge.weights.files.hf_folder import Checkpoint
from mcore_bridge.weights.load import load_hf_weights
from mcore_bridge.weights.source.source import Pairs
from tests import zoo
from tests.support import composites, fake_mesh, parity, pool, quantized
from tests.support.bounds import BOUND
from tests.support.quantized import Format, deepseek, ministral, mxfp4
from tests.support.quantized_cases import CASES, case
from tests.support.strategies import tiny

ONE, TWO, EXPERTS = mb.ParallelDims(), mb.ParallelDims(tp=2, sp=True), mb.ParallelDims(ep=2)

WITHOUT_REFERENCE = (
    *("fbgemm", "each layer", "parts in two forms"),
    *(name for name in CASES if name.startswith("modelopt")),
)
"""Formats that transformers does not dequantize, and blocks of which it needs whole numbers."""


def on_every_rank(hf: Any, dims: mb.ParallelDims, source: Any, dtype: torch.dtype) -> tuple[list[Any], Any]:
    """The tensors of each rank after a load, and the report of the first rank."""
    reports = []
    load = lambda chunks: reports.append(load_hf_weights(chunks, source, dtype=dtype))  # noqa: E731
    held = fake_mesh.build_everywhere(hf, dims, load, dtype=dtype)
    return [dict(bound.tensors) for bound, _ in held], reports[0]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("name", CASES)
def test_each_rank_holds_its_slices_of_the_decoded_file(name: str, tmp_path: Path) -> None:
    """Loads of plain weights are tested in other files."""
    hf, form, dtype, dims = case(name)
    files, plain = quantized.write(hf, form, tmp_path, dtype=dtype)
    expected, _ = on_every_rank(hf, dims, plain, dtype)
    found, report = on_every_rank(read_hf(tmp_path), dims, tmp_path, dtype)
    assert_same(found, expected)
    assert set(report.ignored) == {each for each in files if each.endswith(quantized.OF_ACTIVATIONS)}
    assert all(text.endswith(f"] -> {str(dtype).removeprefix('torch.')}") for text in decoded(report).values())


def decoded(report: Any) -> dict[str, str]:
    """The tensors that a load has decoded, by name."""
    return {name: text for name, text in report.cast.items() if text.startswith(("float8", "mxfp4", "int4", "nvfp4"))}


@pytest.mark.parametrize("name", ["ministral3", "gpt_oss", "deepseek_v4", "kimi_k2", "nvfp4", "modelopt"])
def test_mappings_and_pairs_are_decoded_alike(name: str, tmp_path: Path) -> None:
    """Codes and scales of pairs wait for each other, in any order."""
    hf, form, dtype, _ = case(name)
    files, plain = quantized.write(hf, form, tmp_path, dtype=dtype)
    expected, _ = on_every_rank(hf, ONE, plain, dtype)
    for source in (files, iter(files.items()), reversed(files.items())):
        found, report = on_every_rank(read_hf(tmp_path), ONE, source, dtype)
        assert_same(found, expected)
        wanted = {each for each, tensor in plain.items() if form.is_quantized(each, tensor)}
        assert decoded(report).keys() == wanted
        assert set(report.ignored) == {each for each in files if each.endswith(quantized.OF_ACTIVATIONS)}


@pytest.mark.parametrize("name", ["ministral3", "gpt_oss", "kimi_k2"])
def test_a_weight_of_pairs_leaves_when_its_parts_have_come(name: str, tmp_path: Path) -> None:
    """A load of pairs never holds all codes of a model."""
    hf, form, dtype, _ = case(name)
    files, _ = quantized.write(hf, form, tmp_path, dtype=dtype)
    waiting = list(files.items())
    read = Pairs(
        iter(lambda: waiting.pop(0) if waiting else None, None),
        read_quantization(read_hf(tmp_path).quantization_config),
    )
    left = [len(waiting) for _, weight in read if not isinstance(weight, torch.Tensor)]
    assert left[0] > len(files) / 2
    assert len(set(left)) > len(left) / 2


@pytest.mark.skipif(not zoo.NEWEST, reason="transformers 4 decodes FP8 on GPUs alone")
@pytest.mark.parametrize("name", [name for name in CASES if name not in WITHOUT_REFERENCE])
def test_transformers_decodes_the_same(name: str, tmp_path: Path) -> None:
    """This shows that the reference formulas of this file are transformers' formulas."""
    hf, form, dtype, _ = case(name)
    _, plain = quantized.write(hf, form, tmp_path / "quantized", dtype=dtype)
    found = quantized.oracle(tmp_path / "quantized", dtype).state_dict()
    (tmp_path / "plain").mkdir()
    expected = parity.reference_model(hf, str(tmp_path / "plain"), plain, dtype).state_dict()
    assert_same([found], [expected])


LOGITS = {
    name: [ONE, TWO, *([EXPERTS] if name in ("qwen3_moe", "minimax_m2", "gpt_oss", "kimi_k2") else [])]
    for name in CASES
    if name not in ("blocks", "nvfp4", *WITHOUT_REFERENCE)
}


@pytest.mark.skipif(not zoo.NEWEST, reason="transformers 4 decodes FP8 on GPUs alone")
@pytest.mark.parametrize("name", LOGITS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    hf, form, _, _ = case(name)
    quantized.write(hf, form, tmp_path)
    model = quantized.oracle(tmp_path, torch.float32).float()  # experts of int4 stay in bf16
    with torch.no_grad():
        reference = model(parity.tokens(hf)).logits
    for dims in LOGITS[name]:
        for (worst,) in pool.run(dims.smallest_world, parity.worst_differences, [(str(tmp_path), dims, reference)]):
            assert worst < BOUND, dims


def test_a_folder_without_scales_does_not_load(tmp_path: Path) -> None:
    """It raises even if a dtype is requested, since codes are no weights."""
    hf = tiny("qwen3", num_hidden_layers=1)
    files, _ = quantized.write(hf, deepseek((8, 8)), tmp_path)
    save_file(
        {name: each for name, each in files.items() if "k_proj.weight_" not in name}, tmp_path / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"k_proj\.weight is float8_e4m3fn and has no scale"):
        on_every_rank(hf, ONE, tmp_path, torch.bfloat16)


@pytest.mark.parametrize(
    ("note", "message"),
    [
        (
            {"bits": 4, "group_size": 64},
            r"quant_method must be .*found \"none beside \['bits', 'group_size'\]\", which",
        ),
        ({"quant_method": ["fp8"]}, r"quant_method must be .*found \['fp8'\]"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "W4A8"}}},
            "ModelOpt .*found 'W4A8'",
        ),
        ({"quant_method": "awq"}, "quant_method must be .*found 'awq', which is not read: load the release"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "found 'bitsandbytes'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt must be 'e4m3' or 'float8_e4m3fn', found 'e5m2'"),
        ({"quant_method": "fp8", "expert_dtype": "int8"}, "expert_dtype must be 'fp8' or 'fp4', found 'int8'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "the size of blocks must be two positive whole numbers"),
    ],
)
def test_other_formats_are_refused_by_name(note: dict[str, Any], message: str, tmp_path: Path) -> None:
    hf = tiny("qwen3", quantization_config=note)
    with pytest.raises(ConfigError, match=message):
        mb.to_transformer_config(hf)


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("int4", "weights of compressed-tensors must be an object, or null, found 'int4'"),
        ({**INT4, "symmetric": False}, r"found 'int of 4 bits by group \(group_size=32, symmetric=False\)'"),
        ({**INT4, "actorder": "group"}, "found 'int of 4 bits by group"),
        ({**INT4, "num_bits": 8}, "found 'int of 8 bits by group"),
        ({**INT4, "group_size": None}, r"found 'int of 4 bits by group \(group_size=None"),
        ({**INT4, "strategy": "channel"}, "found 'int of 4 bits by channel"),
        ({**INT4, "type": "float", "strategy": "tensor_group"}, "found 'float of 4 bits by tensor_group"),
        ({**quantized.ROWS, "strategy": "block", "block_structure": None}, "found 'float of 8 bits by block"),
        ({**quantized.ROWS, "strategy": "token"}, "found 'float of 8 bits by token"),
        ({**quantized.ROWS, "num_bits": 4}, "found 'float of 4 bits by channel"),
    ],
)
def test_weights_of_compressed_tensors_that_are_not_read_are_named(weights: Any, message: str) -> None:
    note: dict[str, Any] = {**quantized.compressed("pack-quantized", {}), "sparsity_config": {"format": "dense"}}
    for group in (INT4, None):  # the second group is read, or has no weights
        note["config_groups"] = {"group_0": {"weights": group}, "group_1": {"weights": weights}}
        with pytest.raises(ConfigError, match=message):
            read_quantization(note)


@pytest.mark.parametrize(
    ("note", "message"),
    [
        ("fp8", "must be an object, found 'fp8'"),
        ({"config_groups": {}}, "config_groups of compressed-tensors must be an object for each kind .*, found {}"),
        ({"config_groups": [INT4]}, "config_groups of compressed-tensors must be an object"),
        ({"transform_config": {"config_groups": {}}}, "transform_config of compressed-tensors must be none"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config of compressed-tensors must be none"),
    ],
)
def test_other_parts_of_a_note_that_are_not_read_are_named(note: Any, message: str) -> None:
    if isinstance(note, dict):
        note = {**quantized.compressed("pack-quantized", INT4), **note}
    with pytest.raises(ConfigError, match=message):
        read_quantization(note)


def test_blocks_are_those_of_fp8_alone() -> None:
    for form in (quantized.nvfp4("modelopt"), quantized.nvfp4("compressed-tensors"), quantized.int4(32), mxfp4()):
        assert read_quantization(form.note).block is None


GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "actorder": "static"}
BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128x64"}


@pytest.mark.parametrize(
    ("note", "allowed"),
    [
        ({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}, set()),
        ({"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}}, set()),
        (quantized.compressed("pack-quantized", GROUP), {("int4", (1, 32))}),
        (quantized.compressed("float-quantized", BLOCKS), {("fp8", (128, 64))}),
    ],
)
def test_notes_in_other_spellings_are_read(note: dict[str, Any], allowed: set[Any]) -> None:
    """Two of the formats quantize only the KV cache."""
    found = read_quantization(note)
    assert found is not None
    assert found.allowed == allowed


@pytest.mark.parametrize("algorithm", ["NVFP4", "FP8"])
def test_a_note_of_modelopt_may_be_in_its_own_file(algorithm: str, tmp_path: Path) -> None:
    """The description is then not in config.json. It must fit the files, which are NVFP4."""
    hf, form, dtype, _ = case("modelopt")
    _, plain = quantized.write(hf, form, tmp_path, dtype=dtype)
    config = tmp_path / "config.json"
    fields = json.loads(config.read_text())
    del fields["quantization_config"]
    config.write_text(json.dumps(fields))
    note = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": None}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(note))
    if algorithm == "FP8":
        with pytest.raises(CheckpointError, match=r"quantization_config says fp8 by tensor, found others: .*nvfp4"):
            on_every_rank(read_hf(tmp_path), ONE, tmp_path, dtype)
        return
    expected, _ = on_every_rank(hf, ONE, plain, dtype)
    assert_same(on_every_rank(read_hf(tmp_path), ONE, tmp_path, dtype)[0], expected)


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, lambda path: path.write_text("{"), lambda path: path.write_text("[" * 200_000), Path.mkdir],
    ids=["FIFO", "half", "deep", "dir"],
)
def test_a_note_of_modelopt_that_is_no_file_of_json_is_refused(make: Callable[[Path], Any], tmp_path: Path) -> None:
    hf, form, dtype, _ = case("modelopt")
    quantized.write(hf, dataclasses.replace(form, note=None), tmp_path, dtype=dtype)
    make(tmp_path / "hf_quant_config.json")
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json (is|must be)"):
        on_every_rank(read_hf(tmp_path), ONE, tmp_path, dtype)


def test_scales_may_have_the_name_that_mistral_gives_them(tmp_path: Path) -> None:
    """``qscale_weight`` is one number beside each ``weight``. ``qscale_act`` is for activations, and no weight needs
    it.
    """
    form = quantized.fp8(None, ministral().note, name=".qscale_weight", extra={".qscale_act": torch.tensor(0.5)})
    files, plain = quantized.write(tiny("llama"), form, tmp_path)
    assert any(name.endswith(".qscale_weight") for name in files)
    expected, _ = on_every_rank(tiny("llama"), TWO, plain, torch.float32)
    for source in (tmp_path, [*reversed(files.items())]):
        found, report = on_every_rank(read_hf(tmp_path), TWO, source, torch.float32)
        assert_same(found, expected)
        assert set(report.ignored) == {name for name in files if name.endswith(".qscale_act")}


def test_what_is_saved_is_plain(tmp_path: Path) -> None:
    quantized.write(tiny("qwen3"), deepseek((8, 8)), tmp_path / "quantized", dtype=torch.bfloat16)
    pool.run(1, load_and_save_from, str(tmp_path / "quantized"), str(tmp_path / "saved"))
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"
    state = quantized.write(tiny("qwen3"), deepseek((8, 8)), tmp_path / "again", dtype=torch.bfloat16)[1]
    assert_same([dict(Checkpoint(tmp_path / "saved"))], [state])


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_no_more_is_decoded_at_once_than_a_slot_takes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No whole tensor is decoded, so host memory is bounded. Rows of one block are in several pieces.

    Coordinates are cut once for all weights of one shape.
    """
    hf, form, dtype, _ = case(name)
    quantized.write(hf, form, tmp_path, dtype=dtype)
    expected, _ = on_every_rank(read_hf(tmp_path), ONE, tmp_path, dtype)
    sizes, cuts, slices = [], [], []
    decode, cut, of = EncodedSlice.decode, Encoded.cut, EncodedSlice.of

    def counting(self: EncodedSlice, parts: Any, dtype: torch.dtype) -> torch.Tensor:
        values = decode(self, parts, dtype)
        sizes.append(values.numel())
        return values

    monkeypatch.setattr(EncodedSlice, "decode", counting)
    monkeypatch.setattr(Encoded, "cut", lambda self, cutting: cuts.append(self.name) or cut(self, cutting))
    monkeypatch.setattr(EncodedSlice, "of", lambda self, weight: slices.append(weight.name) or of(self, weight))
    load = lambda chunks: load_hf_weights(chunks, tmp_path, slot_bytes=1 << 11)  # noqa: E731
    held = fake_mesh.build_everywhere(read_hf(tmp_path), ONE, load, dtype=dtype)
    assert_same([dict(bound.tensors) for bound, _ in held], expected)
    assert max(sizes) * 8 <= 1 << 11
    assert 0 < 2 * len(cuts) <= len(slices)


@pytest.mark.parametrize(("model_type", "form"), [("mistral3", ministral()), ("qwen3_vl", deepseek((4, 4)))])
def test_a_quantized_composite_loads_and_is_saved_plain(model_type: str, form: Format, tmp_path: Path) -> None:
    """Its text is decoded, and so are copied tensors, if a publisher has quantized them."""
    if model_type not in composites.NAMES:
        pytest.skip("the installed transformers lacks it")
    composites.written(model_type, tmp_path)
    state = {name: tensor.bfloat16() for name, tensor in Checkpoint(tmp_path).items()}
    text = {name for name in state if "language_model.layers" in name or "language_model.model.layers" in name}
    form = dataclasses.replace(form, quantizes=lambda name: name.endswith(".weight") and name in text)
    assert any(form.is_quantized(name, tensor) for name, tensor in state.items())
    config = tmp_path / "config.json"
    fields = json.loads(config.read_text())
    save_file(form.files(state), tmp_path / "model.safetensors", metadata={"format": "pt"})
    (fields if model_type == "mistral3" else fields["text_config"])["quantization_config"] = form.note
    config.write_text(json.dumps(fields))
    pool.run(1, load_and_save_from, str(tmp_path), str(tmp_path / "saved"))
    assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()
    assert_same([dict(Checkpoint(tmp_path / "saved"))], [form.decoded(state, torch.bfloat16)])


def load_and_save_from(folder: str, saved: str) -> None:
    ONE.initialize(device="cpu")
    mb.save_hf_checkpoint(mb.build_model(folder, dims=ONE, device="cpu"), saved)
