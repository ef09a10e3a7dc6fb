"""Each refused name or value raises the reason that the documentation has, and the code that it refers to exists."""

import dataclasses
import importlib
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING

from mcore_bridge import architecture as registry
from mcore_bridge.architecture import Refusal, architecture_of, architectures, read_hf, refusals, register
from mcore_bridge.config.fields import Derive, Require
from mcore_bridge.errors import ConfigError
from tests.support import bailing
from tests.support.gpu_models import FAMILIES
from tests.support.twins import TWINS
from tests.zoo import described

NO_CODE = next(each for each in refusals() if "internlm2" in each.model_types)
REMOTE = {"Emu3", "ernie4_5_moe_vl", "mimo_v2", "minimax_m3"}
"""Names that no release of transformers has: publishers have their own, or publish code beside the weights."""
SINCE_5_24 = {
    *("apertus1p5", "apertus1p5_text", "dory", "hy_v4_vl", "inkling2_loop", "inkling2_loop_text", "lara_mini"),
}
"""Names that transformers 5.23 lacks."""
REMOTE |= {*NO_CODE.model_types} - SINCE_5_24
SINCE_5 = {
    *("cohere_compass", "cohere_compass_text", "diffusion_gemma", "gemma4_assistant", "gemma4_unified_assistant"),
    *("hrm_text", "kolibri1", "mllama_text_model", "lfm3_vl", "minicpm3", "paddleocr_vl"),
    *("ernie4_5_vl_moe", "glm_ocr", "mimo_v2_flash", "molmo2"),
    "t5gemma2",
    *("afmoe", "axk2", "beam", "dots3_note", "dots3_note_text", "ernie4_5_vl_moe_text", "flint"),
    *("granite_swa", "granitemoe_swa", "hyperclovax"),
    *("inkling_mm_model", "inkling_text", "inkling2", "inkling2_text", "laguna", "minimax_m3_vl"),
    *("minimax_m3_vl_text", "mistral_large4", "mistral_large4_text", "muse_glimmer", "muse_glimmer_text"),
    *("muse_spark", "muse_spark_text", "nanochat", "qwen4_exp", "qwen4_exp_text", "zaya"),
}
"""Names that transformers 4.57 lacks."""
SINGLE = [each for each in refusals() if len(each.model_types) == 1]
ENCODERS, COMPOSITES = (
    next(each for each in refusals() if name in each.model_types) for name in ("t5", "gemma3n")
)  # and nothing else is one of many names


def names() -> list[str]:
    return sorted(name for refusal in refusals() for name in refusal.model_types)


def test_no_name_is_refused_twice_or_registered() -> None:
    assert len(set(names())) == len(names()) > 70
    assert not set(names()) & set(architectures())
    assert {*SINGLE, ENCODERS, COMPOSITES, NO_CODE} == set(refusals())


@pytest.mark.parametrize("refusal", refusals(), ids=lambda each: each.model_types[0])
def test_each_name_raises_its_reason_and_where_it_was_checked(refusal: Refusal) -> None:
    for name in refusal.model_types:
        with pytest.raises(ConfigError) as caught:
            architecture_of(name)
        assert all(part in str(caught.value) for part in (repr(name), refusal.reason, *refusal.checked))
        assert refusal.reason[-1] not in ".;"


def test_each_name_is_one_of_transformers_or_of_published_code() -> None:
    later = [(5, SINCE_5), (5.24, SINCE_5_24)]
    release = float(".".join(transformers.__version__.split(".")[:2]))
    expected = REMOTE.union(*(later_names for since, later_names in later if release < since))
    assert {name for name in names() if name not in CONFIG_MAPPING} == expected & {*names()}


@pytest.mark.parametrize("name", sorted({seen for refusal in refusals() for seen in refusal.checked}))
def test_the_code_where_it_was_checked_exists(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    if module.startswith("transformers.models."):
        if importlib.util.find_spec(module.rpartition(".")[0]) is None:
            assert module.split(".")[2] in {each.removesuffix("_text") for each in SINCE_5 | SINCE_5_24}
            return
        found = importlib.util.find_spec(module)
        assert found is not None
        assert attribute in Path(str(found.origin)).read_text().replace("(", " ").replace(":", " ").split()
        return
    if module == "transformers.PretrainedConfig":
        assert hasattr(transformers.PretrainedConfig(), attribute)
    else:
        assert hasattr(importlib.import_module(module), attribute)


def test_encoders_with_decoders_are_that() -> None:
    for name in set(ENCODERS.model_types) & set(CONFIG_MAPPING):
        assert CONFIG_MAPPING[name]().is_encoder_decoder, name


def test_composites_are_of_a_model_of_text_and_another() -> None:
    for name in set(COMPOSITES.model_types) & set(CONFIG_MAPPING):
        parts = set(CONFIG_MAPPING[name].sub_configs)
        assert "text_config" in parts, (name, parts)
        assert len(parts) > 1, (name, parts)


def test_a_composite_is_told_how_its_text_is_trained_if_it_can_be() -> None:
    with pytest.raises(ConfigError, match=r"its text model \('gemma'\) alone, pass its text_config"):
        architecture_of(CONFIG_MAPPING["paligemma"]())
    with pytest.raises(ConfigError) as caught:
        architecture_of(CONFIG_MAPPING["gemma3n"]())
    assert "alone" not in str(caught.value)
    assert "docs/reference/families.md" in caught.value.__notes__[0]


@pytest.mark.parametrize("name", ["kimi_k3", "dory", "mamba"])
def test_a_folder_is_refused_with_the_reason_whether_or_not_transformers_knows_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    (reason,) = (refusal.reason for refusal in refusals() if name in refusal.model_types)
    with pytest.raises(ConfigError) as caught:
        architecture_of(read_hf(tmp_path))
    assert reason in str(caught.value)


def test_a_package_can_register_a_name_that_we_refuse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", dict(architectures()))
    own = [
        dataclasses.replace(architecture_of("llama"), model_type=name, reads_as="llama")
        for name in ("mamba", "kimi_k3")
    ]
    assert [architecture_of(register(each).model_type) for each in own] == own
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k3"}))
    assert architecture_of(read_hf(tmp_path)) == own[1]


ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor")
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 8}
EXAMPLES: dict[str, tuple[dict[str, Any], str]] = {
    "`hidden_act`, any but": ({"hidden_act": "quick_gelu"}, "hidden_act must be one of"),
    "`hidden_activation`, any but": ({"hidden_activation": "quick_gelu"}, "hidden_activation must be one of"),
    "`mlp_hidden_act`, any but": ({"mlp_hidden_act": "quick_gelu"}, "mlp_hidden_act must be one of"),
    "`layers_block_type` other than": ({"layers_block_type": ["mamba2"]}, "layers_block_type must name"),
    "`time_step_limit` other than": ({"time_step_limit": [0.001, float("inf")]}, "time_step_limit must be"),
    "`mamba_norm_before_gate` with": (
        {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
        "mamba_norm_before_gate must be False",
    ),
    "`attention_head_dim` other than": ({"attention_head_dim": 7}, "attention_head_dim must be head_dim"),
    "`head_dim` other than `hidden_size": ({"head_dim": 7}, "head_dim must be .* Delete head_dim"),
    "`mlp_bias` without": ({"mlp_bias": True, "attention_bias": False}, "mlp_bias=True must come with"),
    "rope types other": ({"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}}, "rope type must be"),
    "`partial_rotary_factor` of a default rope": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor must be 1 in a rope of type 'default'",
    ),
    "`per_layer_config` with": ({"per_layer_config": {"1": {"intermediate_size": 8}}}, "per_layer_config must have"),
    "`num_key_value_heads` other than": ({"num_key_value_heads": 1}, "num_key_value_heads must be"),
    "`layer_types` other than": ({"layer_types": "other_attention"}, "layer_types must"),
    "`sliding_window` where": ({"layer_types": "full_attention", "sliding_window": 8}, "sliding_window=8 must"),
    "`use_sliding_window=False` with": (
        {"layer_types": "sliding_attention", "sliding_window": 8, "use_sliding_window": False},
        "use_sliding_window must be True",
    ),
    "another `rope_theta`": ({"rope_theta": 1e4, "rope_local_base_freq": 2e4}, "rope_theta must be the same"),
    "`hidden_act` other": ({"layer_types": "linear_attention", "hidden_act": "gelu"}, "hidden_act must be 'silu'"),
    "`norm_topk_prob=True` with one": (
        {"norm_topk_prob": True, "num_experts_per_tok": 1},
        "norm_topk_prob must be False",
    ),
    "`norm_topk_prob=False` with several": (
        {"norm_topk_prob": False, "num_experts_per_tok": 2},
        "norm_topk_prob must be True",
    ),
    "`n_group` above 1": ({"n_group": 4, "topk_group": 3, "num_experts_per_tok": 4}, "must be twice topk_group=3"),
    "`topk_method` other than `greedy`": ({"topk_method": "best"}, "topk_method must be 'greedy'"),
    "`group_limited_greedy` unless": (
        {"topk_method": "group_limited_greedy", "topk_group": 2, "num_experts_per_tok": 5},
        "must be less than twice topk_group=2",
    ),
    "`num_experts` that": ({"num_experts": [4]}, "num_experts must be"),
    "`indexer_types` that": (
        {"indexer_types": ["full", "shared", "full", "full"], "index_topk_freq": None},
        "indexer_types must repeat",
    ),
    "`indexer_types` other than `full`": ({"indexer_types": ["shared"] * 4}, "indexer_types must name"),
    "`index_local_blocks` above": ({"index_local_blocks": 9}, "index_local_blocks must be a number from 0 to"),
    "`indexer_n_heads=None`": ({"indexer_n_heads": None}, "indexer_n_heads must be"),
    "`ple_layer_ids` without": ({"ple_layer_ids": [1], "eos_token_id": None}, "with ple_layer_ids, ngram_size must"),
    "`index_head_dim` below": ({"index_head_dim": 10}, "index_head_dim must be at least 12"),
    "`rotary_dim` other than": ({"rotary_dim": 2}, "rotary_dim must be"),
    "`moe_topk` that": ({"moe_topk": [2, 4] * 16}, "moe_topk must be"),
    "`partial_rotary_factor` of a rope other than": (
        {"rope_parameters": {**YARN, "partial_rotary_factor": 0.75}},
        "partial_rotary_factor must be",
    ),
    "a `partial_rotary_factor` with": (
        {"rope_parameters": {**YARN, "partial_rotary_factor": 0.75}},
        "The rope must not have",
    ),
    "`expert_selection_fn` other than": ({"expert_selection_fn": "tanh"}, "expert_selection_fn must be"),
    "sigmoid scores of several": (
        {"expert_selection_fn": "sigmoid", "norm_topk_prob": False, "num_experts_per_tok": 2},
        "norm_topk_prob must be True with sigmoid scores",
    ),
    "`shared_expert_combination_strategy` other than": (
        {"shared_expert_combination_strategy": "product"},
        "shared_expert_combination_strategy must be",
    ),
    "`layer_rope_theta` other than": ({"layer_rope_theta": [7.0] * 64}, "layer_rope_theta must have"),
    "`gating=False`": ({"gating": False}, "gating must be True"),
    "`layernorm_epsilon` of": ({"layernorm_epsilon": 7}, "layernorm_epsilon must be"),
    "`swa_num_attention_heads`, ": ({"swa_head_dim": 7}, "swa_head_dim must be"),
    "`hybrid_layer_pattern`, ": ({"sliding_window_size": 7}, "sliding_window_size must be"),
    "`moe_layer_freq` of": ({"moe_layer_freq": [7] * 64}, "moe_layer_freq must be"),
    "`rope_theta`, `swa_rope_theta` of": ({"swa_rope_theta": 7}, "swa_rope_theta must be"),
    "`num_kv_shared_layers` without": (
        {"num_kv_shared_layers": 1, "hidden_size_per_layer_input": 0},
        "num_kv_shared_layers must",
    ),
    "`vocab_size_per_layer_input` other": (
        {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 7},
        "vocab_size_per_layer_input must be",
    ),
    "`quant_method` other than": ({"quantization_config": {"quant_method": "gptq"}}, "quant_method must be"),
    "formats of compressed-tensors": (
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "INT4_AWQ"}},
        "quant_algo of ModelOpt must be",
    ),
}
"""For each refusal of ``Derive``, by its beginning: changes of a config, and words of the error. Layers are all
alike.
"""


def example_of(text: str, hf: dict[str, Any]) -> tuple[dict[str, Any], str]:
    if text.endswith("of a rope: the modelling code does not reproduce it"):
        name = text.split("`")[1]
        kind = (hf.get("rope_parameters") or hf.get("rope_scaling") or {}).get("rope_type")
        plain = (
            YARN if kind == "yarn" or name == "llama_4_scaling_beta" else {"rope_type": "default", "rope_theta": 1e4}
        )
        dim = hf.get("qk_rope_head_dim") or hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
        return {"rope_parameters": {**plain, name: 2.5 / dim}}, "The rope must not have"
    (found,) = (found for start, found in EXAMPLES.items() if text.startswith(start))
    return found


def fields_of(model_type: str) -> dict[str, Any]:
    """The HF fields of a model that other tests show to be exact."""
    if model_type.startswith("bailing_moe"):
        return bailing.TINY["grouped"]
    if model_type in TWINS:
        return dict(FAMILIES[model_type].to_dict())
    owner = architecture_of(model_type).reads_as or model_type
    hf: dict[str, Any] = next(each.hf for each in described().values() if each.model_type == owner).to_dict()
    return hf


def changed(hf: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in hf.items() if name not in ROPE or not set(ROPE) & set(change)}
    layers = {name: [kind] * hf["num_hidden_layers"] for name, kind in change.items() if name == "layer_types"}
    return {**kept, **change, **layers}


@pytest.mark.parametrize("model_type", sorted(architectures()))
def test_each_value_that_is_said_to_be_refused_raises(model_type: str) -> None:
    if (architecture_of(model_type).reads_as or model_type) not in CONFIG_MAPPING:
        pytest.skip("the installed transformers lacks it")
    hf = fields_of(model_type)
    for field in architecture_of(model_type).fields:
        examples = [example_of(text, hf) for text in field.refuses] if isinstance(field, Derive) else []
        if isinstance(field, Require):
            examples.append(({field.hf: "another"}, f"{field.hf} must be .*{re.escape(field.reason)}"))
        for change, said in examples:
            field.to_mcore(hf)
            with pytest.raises(ConfigError, match=said):
                field.to_mcore(changed(hf, change))


def test_every_example_is_of_some_family() -> None:
    fields = {field for each in architectures().values() for field in each.fields if isinstance(field, Derive)}
    told = {text for field in fields for text in field.refuses}
    assert all(any(text.startswith(start) for text in told) for start in EXAMPLES)
