"""Descriptions of new formats, which a user passes as ``quantize=``."""

from fnmatch import fnmatch
from typing import Any

import pytest
import torch

from mcore_bridge.config.quantization import fields_of, left_out_by, read_quantization
from mcore_bridge.errors import ConfigError
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.source.new_scheme import (
    is_left_out,
    is_target,
    new_scheme,
    read_description,
    warn_of_misspelt,
    written_description,
)
from tests.support.published import records
from tests.support.quantized import ROWS

FP8 = {"quant_method": "fp8"}
GROUP = {"weights": ROWS}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {"all": GROUP}}
MODULES = [
    f"{model}.layers.{layer}.{module}"
    for model in ("model", "model.language_model", "language_model.model")
    for layer in (0, 1, 10)
    for module in ("self_attn.q_proj", "self_attn.q_a_proj", "mlp.up_proj", "mlp.experts.1.up_proj", "mlp.gate")
]


def ends(name: str) -> list[str]:
    words = name.split(".")
    return [".".join(words[start:]) for start in range(len(words))]


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": -32}


@pytest.mark.parametrize(
    ("note", "messages"),
    [
        ({**FP8, "weight_block_sizes": [8, 8]}, ["'weight_block_sizes'", "is it 'weight_block_size'"]),
        ({**FP8, "expert_dtype": "fp4"}, ["unknown field 'expert_dtype', correct or remove it"]),
        ({**FP8, "modules_to_not_convert": "lm_head"}, ["modules_to_not_convert='lm_head', pass a list"]),
        ({**FP8, "ignore": ["re:["]}, [r"the pattern 're:\[', correct it: "]),
        ({**FP8, "activation_scheme": "static", "fmt_": 1}, ["field 'fmt_'", "'static' .pass 'dynamic'. needs scales"]),
        ({**FP8, "weight_block_size": [8]}, [r"two positive whole numbers below 2 \*\* 31, found \[8\]. Correct it"]),
        ({**FP8, "weight_block_size": [10**20, 1]}, [r"two positive whole numbers below 2 \*\* 31, found \[1000"]),
        ({**FP8, "expert_dtype": ["fp4"]}, [r"expert_dtype must be 'fp8' or 'fp4', found \['fp4'\]"]),
        *(
            ({**COMPRESSED, "config_groups": {"all": {**GROUP, "targets": targets}}}, [f"a list of .*{targets!r}"])
            for targets in (3, "Linear")
        ),
        ({**FP8, "weight_block_size": [True, True]}, [r"two positive whole numbers below .*, found \[True, True\]"]),
        (
            {**FP8, "scale_fmt": "UE8M0", "ignored_layers": [3]},
            ["found scale_fmt='UE8M0', pass 'ue8m0'", r"=\[3\], pass a"],
        ),
        ({**COMPRESSED, "config_groups": {"all": {"weights": INT4}}}, [r"int of 4 bits by group \(group_size=-32"]),
        ({"quantization": {"quant_algo": "NVFP4"}}, ["quant_algo='NVFP4' .pass 'W4A16_NVFP4'."]),
        ({"quant_algo": "fp8"}, ["quant_algo='FP8' .pass 'FP8_PER_CHANNEL_PER_TOKEN'."]),
        (
            {**COMPRESSED, "config_groups": {"all": {**GROUP, "input_activations": {"dynamic": "local"}}}},
            ["input_activations of all with dynamic='local' .pass null, or true.", "pass the folder of a release"],
        ),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"q_proj": {"quant_algo": "FP8_PB_WO"}}},
            ["found quantized_layers=.*pass one quant_algo, and list other modules in 'exclude_modules'"],
        ),
        ({"quant_algo": "W4A16_NVFP4", "group_size": 32}, ["found group_size=32 of weights, pass 16 or leave it out"]),
        ({"quant_algo": "FP8_PB_WO", "group_size": 64, "kv_cache_quant_algo": "FP8"}, ["pass 128", "='FP8', leave it"]),
        (
            {**COMPRESSED, "format": "pack-quantized"},
            ["found format='pack-quantized' of weights, pass 'float-quantized' or leave it out"],
        ),
        (
            {**COMPRESSED, "config_groups": {"all": {**GROUP, "weights": {**ROWS, "dynamic": True, "group_size": 8}}}},
            ["found dynamic=True of weights, pass False", "found group_size=8 of weights, pass None"],
        ),
        (
            {**COMPRESSED, "config_groups": {"all": {"weights": {**INT4, "group_size": 32, "actorder": "group"}}}},
            [r"order of the columns .* found .*symmetric=None, actorder=group\)"],
        ),
    ],
)
def test_what_a_description_cannot_ask_for_is_named(note: dict[str, Any], messages: list[str]) -> None:
    for message in messages:
        with pytest.raises(ConfigError, match=message):
            read_description(note)


@pytest.mark.parametrize(
    ("note", "written"),
    [
        (
            {**FP8, "ignored_layers": ["o_proj"]},
            {
                **FP8,
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": ["lm_head", "model.embed_tokens", "o_proj"],
            },
        ),
        (
            {"quantization": {"quant_algo": "W4A16_NVFP4", "exclude_modules": ["mtp*"]}},
            {
                "quant_method": "modelopt",
                "quant_algo": "W4A16_NVFP4",
                "ignore": ["lm_head", "model.embed_tokens", "mtp*"],
            },
        ),
        (
            COMPRESSED,
            {
                **COMPRESSED,
                "config_groups": {"all": {**GROUP, "targets": ["Linear"]}},
                "format": "float-quantized",
                "quantization_status": "compressed",
                "ignore": ["lm_head", "model.embed_tokens"],
            },
        ),
    ],
)
def test_what_is_written_has_all_that_engines_require(note: dict[str, Any], written: dict[str, Any]) -> None:
    assert written_description(note, "fp8", ["model.embed_tokens"]) == written
    read_description(written)


def test_published_lists_leave_out_what_engines_leave_out() -> None:
    """vLLM compares names of ModelOpt with fnmatch, and compressed-tensors has a function. Here ends of names count."""
    match_name = pytest.importorskip("compressed_tensors.utils.match").match_name
    seen = set()
    for record in records():
        note = record.config.get("quantization_config") or record.hf_quant_config
        fields = fields_of(note) if note else {}
        if (method := fields.get("quant_method")) not in ("modelopt", "compressed-tensors"):
            continue
        match = match_name if method == "compressed-tensors" else fnmatch
        patterns = left_out_by(fields)
        expected = {module for module in MODULES if any(match(end, own) for end in ends(module) for own in patterns)}
        assert {module for module in MODULES if is_left_out(f"{module}.weight", patterns)} == expected, record.name
        seen |= {(method, module) for module in expected}
    assert len(seen) > len(MODULES) // 2


@pytest.mark.parametrize(("target", "found"), [("Linear", 45), ("re:.*self_attn.*", 18), (MODULES[0], 1), ("Conv", 0)])
def test_a_target_is_a_class_a_name_or_a_pattern(target: str, found: int) -> None:
    assert sum(is_target(f"{module}.weight", [target]) for module in MODULES) == found


def test_a_misspelt_module_is_named(caplog: pytest.LogCaptureFixture) -> None:
    names = [f"{module}.weight" for module in MODULES]
    right = ["lm_head", "mlp.gate", "model.layers.0.self_attn", "re:.*q_porj", "*q_porj", "model.layers.20.mlp.up_proj"]
    warn_of_misspelt(["model.layers.0.self_attn.q_porj", *right, MODULES[0]], names)
    assert [record.getMessage() for record in caplog.records] == [
        "quantize leaves out model.layers.0.self_attn.q_porj, of which the model has none, and encodes "
        "model.layers.10.self_attn.q_proj: correct the name if it is meant"
    ]


def test_columns_of_int4_divide_into_words() -> None:
    weights = {**INT4, "group_size": 2, "symmetric": True}
    note = {**COMPRESSED, "format": "pack-quantized", "config_groups": {"all": {"weights": weights}}}
    quantization = read_quantization(note)
    assert quantization is not None
    with pytest.raises(ConfigError, match=r"groups of int4 .* and words of 8 codes, found x\.weight \[48, 22\]"):
        new_scheme([TensorSpec("x.weight", (48, 22), torch.bfloat16)], quantization)
    assert new_scheme([TensorSpec("x.weight", (48, 24), torch.bfloat16)], quantization).held
