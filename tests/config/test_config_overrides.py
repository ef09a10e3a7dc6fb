"""The effect of mesh, dtype and overrides on a config, after the table."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.config.transformer import to_gpt_arguments, to_hf_config, to_transformer_config
from mcore_bridge.errors import ConfigError, MeshError
from tests import zoo
from tests.support.families import family, read, table_of
from tests.support.strategies import tiny


def test_overrides_come_last_and_may_be_none(tmp_path: Path) -> None:
    hf = read(family("llama"), tmp_path)
    overrides = {"num_layers": 2, "hidden_dropout": 0.2, "recompute_granularity": None, "parallel_output": False}
    config = to_transformer_config(hf, table_of(hf), overrides=overrides)
    arguments = to_gpt_arguments(hf, table_of(hf), overrides=overrides)
    assert (config.num_layers, config.hidden_dropout, config.recompute_granularity) == (2, 0.2, None)
    assert arguments["parallel_output"] is False
    assert to_hf_config(config, arguments, table_of(hf))["num_hidden_layers"] == 2
    assert to_transformer_config(hf, table_of(hf), overrides={"kv_channels": None}).kv_channels == 8
    assert to_transformer_config(hf, table_of(hf), overrides={"kv_channels": None}).hf_rope.head_dim == 8


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("num_layer", "nearest names: num_layers"),
        ("rotary_bass", "nearest names: rotary_base"),
        ("tensor_model_parallel_size", r"ParallelDims\(tp=...\)"),
        ("sequence_parallel", r"ParallelDims\(sp=...\)"),
        ("pre_process", "build_model decides it"),
        ("hf_rope", "must be a TransformerConfig field"),
    ],
)
def test_an_override_that_reaches_nothing_is_refused(name: str, message: str, tmp_path: Path) -> None:
    hf = read(family("llama"), tmp_path)
    for function in (to_transformer_config, to_gpt_arguments):
        with pytest.raises(ConfigError, match=message):
            function(hf, table_of(hf), overrides={name: 1})


def test_parameters_in_four_bits_are_refused(tmp_path: Path) -> None:
    hf = read(family("llama"), tmp_path)
    with pytest.raises(ConfigError, match="fp4_param must be False"):
        to_transformer_config(hf, table_of(hf), overrides={"fp4": "e4m3", "fp4_param": True})


@pytest.mark.parametrize(
    ("hf", "switch", "others"),
    [
        (tiny("llama", hidden_act="gelu"), "bias_activation_fusion", {}),
        (tiny("llama", hidden_act="gelu"), "use_te_activation_func", {}),
        (tiny("llama"), "use_te_activation_func", {"activation_func_clamp_value": 7.0}),
        (tiny("llama"), "use_te_activation_func", {"glu_linear_offset": 1.0}),
        (tiny("llama"), "use_te_activation_func", {"gated_linear_unit": False}),
        (zoo.cases()["nemotron"].hf, "use_te_activation_func", {}),
        (zoo.cases()["apertus"].hf, "use_te_activation_func", {}),
        (zoo.cases()["gpt_oss"].hf, "use_te_activation_func", {}),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_a_kernel_of_another_activation_is_refused(hf: Any, switch: str, others: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{switch} must be False"):
        mb.to_transformer_config(hf, overrides={switch: True, **others})
    assert mb.to_transformer_config(tiny("llama"), overrides={switch: True})


def test_every_field_of_the_mesh_is_refused_as_an_override(tmp_path: Path) -> None:
    hf = read(family("llama"), tmp_path)
    for name in ParallelDims().to_config_fields():
        with pytest.raises(ConfigError, match="the mesh decides it"):
            to_transformer_config(hf, table_of(hf), overrides={name: 1})


def test_an_override_takes_a_config_out_of_hf_only_with_an_error(tmp_path: Path) -> None:
    hf = read(family("llama"), tmp_path)
    config = to_transformer_config(hf, table_of(hf), overrides={"normalization": "LayerNorm"})
    with pytest.raises(ConfigError, match="normalization must be 'RMSNorm'"):
        to_hf_config(config, to_gpt_arguments(hf, table_of(hf)), table_of(hf))


def test_windows_must_cover_the_layers(tmp_path: Path) -> None:
    hf = read(family("qwen3"), tmp_path)
    assert to_transformer_config(hf, table_of(hf), overrides={"num_layers": 2}).num_layers == 2
    with pytest.raises(ConfigError, match="Override it together with num_layers"):
        to_transformer_config(hf, table_of(hf), overrides={"num_layers": 5})


@pytest.mark.parametrize(("tp", "padded"), [(1, 97), (2, 98)])
def test_the_vocabulary_is_padded_to_tp(tp: int, padded: int, tmp_path: Path) -> None:
    hf = read(family("llama"), tmp_path)
    dims = ParallelDims(tp=tp)
    arguments = to_gpt_arguments(hf, table_of(hf), dims=dims)
    assert arguments["vocab_size"] == padded
    config = to_transformer_config(hf, table_of(hf), dims=dims)
    assert to_hf_config(config, arguments, table_of(hf))["vocab_size"] == config.hf_vocab_size == 97
    assert to_gpt_arguments(hf, table_of(hf), dims=dims, overrides={"vocab_size": 120})["vocab_size"] == 120
    for wrong in (96, 60, *([] if tp == 1 else [121])):
        with pytest.raises(ConfigError, match=f"a multiple of tp={tp} and at least the 97"):
            to_gpt_arguments(hf, table_of(hf), dims=dims, overrides={"vocab_size": wrong})


def test_a_mesh_that_does_not_divide_the_model_is_refused(tmp_path: Path) -> None:
    hf = read(family("llama"), tmp_path)
    with pytest.raises(MeshError, match="must divide num_attention_heads=6"):
        to_transformer_config(hf, table_of(hf), dims=ParallelDims(tp=4))
    with pytest.raises(MeshError, match=r"must divide num_query_groups=2 \(num_key_value_heads in the HF config\)"):
        to_transformer_config(hf, table_of(hf), dims=ParallelDims(tp=3))
    with pytest.raises(MeshError, match="must divide ffn_hidden_size=72"):
        to_transformer_config(hf, table_of(hf), dims=ParallelDims(tp=5), overrides={"num_attention_heads": 10})
    with pytest.raises(MeshError, match="must divide the 160 rows of linear_qkv"):
        to_transformer_config(hf, table_of(hf), dims=ParallelDims(tp=6))
    assert to_transformer_config(hf, table_of(hf), dims=ParallelDims(tp=2)).tensor_model_parallel_size == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_decides_parameters_and_messages(dtype: torch.dtype, tmp_path: Path) -> None:
    hf = read(family("llama"), tmp_path)
    config = to_transformer_config(hf, table_of(hf), dtype=dtype)
    assert config.params_dtype == config.pipeline_dtype == dtype
    assert (config.bf16, config.fp16) == (dtype == torch.bfloat16, dtype == torch.float16)


def test_other_dtypes_and_what_mcore_refuses_are_config_errors(tmp_path: Path) -> None:
    hf = read(family("llama"), tmp_path)
    with pytest.raises(ConfigError, match=r"found torch.float64"):
        to_transformer_config(hf, table_of(hf), dtype=torch.float64)
    with pytest.raises(ConfigError, match="megatron-core refuses"):
        to_transformer_config(hf, table_of(hf), overrides={"recompute_granularity": "nonsense"})
    with pytest.raises(ConfigError, match=r"hidden_dropout must give a number from 0 to 1, found -0\.1"):
        to_transformer_config(hf, table_of(hf), overrides={"hidden_dropout": -0.1})
    assert to_transformer_config(hf, table_of(hf), overrides={"variable_seq_lengths": True}).variable_seq_lengths


def test_configs_can_be_copied(tmp_path: Path) -> None:
    import copy

    hf = read(family("llama", "yarn"), tmp_path)
    config = to_transformer_config(hf, table_of(hf))
    twin = copy.deepcopy(config)
    assert twin.hf_rope == config.hf_rope
    assert to_hf_config(twin, to_gpt_arguments(hf, table_of(hf)), table_of(hf))
    assert dataclasses.is_dataclass(twin.hf_rope)
