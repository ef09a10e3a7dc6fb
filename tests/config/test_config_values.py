"""Biases, windows and refusals: the values that tables derive, field by field."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig

import mcore_bridge as mb
from mcore_bridge.config.fields import to_mcore
from mcore_bridge.config.tables.linear_attention import LOW_RANK_KDA
from mcore_bridge.config.tables.moe import number
from mcore_bridge.config.tables.scales import softcap
from mcore_bridge.config.transformer import to_transformer_config
from mcore_bridge.errors import ConfigError
from mcore_bridge.models.cohere2_moe import _selected
from tests import zoo
from tests.support.families import FAMILIES, Json, family, read, table_of


def long_rope(name: str) -> Json:
    """The fields of a rope of this type, for heads of 16."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    whole = {"rope_parameters": None, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    return {**whole, "rope_scaling": {**factors, "type": name}}


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "quick_gelu"}, "hidden_act must be one of .*found 'quick_gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method must be .*found 'awq'.*release .* in bf16"),
        ({"is_decoder": True}, "is_decoder must be False"),
        ({"add_cross_attention": True}, "add_cross_attention must be False"),
        ({"use_mrope": True}, "use_mrope"),
        ({"mlp_bias": True, "attention_bias": False}, "mlp_bias=True must come with attention_bias=True"),
        ({"num_key_value_heads": 4}, "must be a multiple of num_key_value_heads=4"),
        ({"vocab_size": -3}, "vocab_size must be a positive whole number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number, .*layernorm_epsilon is, found nan"),
        ({"rope_theta": float("inf")}, "must have a number as 'rope_theta', found inf"),
        ({"rope_theta": 10**400}, "must have a number as 'rope_theta', found 1000"),
        (
            {"layer_types": ["sliding_attention"] * 4},
            r"layer_types must be 'full_attention' for every layer, found \['sl",
        ),
    ],
)
def test_what_mcore_cannot_express_is_refused_with_the_reason(change: Json, message: str, tmp_path: Path) -> None:
    hf = read({**family("llama"), **change}, tmp_path)
    with pytest.raises(ConfigError, match=message):
        to_transformer_config(hf, table_of(hf))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("attention_dropout", "x", "a finite number"),
        ("initializer_range", True, "a finite number"),
        ("intermediate_size", 72.5, "a whole number"),
        ("tie_word_embeddings", "no", "true or false"),
    ],
)
def test_a_value_of_another_type_is_refused(name: str, value: object, expected: str) -> None:
    """This library refuses it, since transformers 4 accepts any value."""
    hf = CONFIG_MAPPING["llama"]()
    with pytest.raises(ConfigError, match=f"{name} must be {expected}, as megatron-core's .* is, found {value!r}"):
        to_mcore(table_of(hf), {**hf.to_dict(), name: value})


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("deepseek_v3", {"num_hidden_layers": 10**30}, "num_hidden_layers must be .* at most 10000, found 1000"),
        ("deepseek_v3", {"num_hidden_layers": None}, "num_hidden_layers"),
        ("deepseek_v3", {"rope_theta": 1.0, "rope_scaling": YARN}, "rope_theta of .*'yarn' must be above 1, found 1.0"),
        ("llama", {"rope_theta": -1}, "rope_theta of a rope of type 'default' must be above 0, found -1"),
        ("deepseek_v3", {"moe_layer_freq": {"a": 1}}, "moe_layer_freq={'a': 1} must be of the kinds"),
        (
            "deepseek_v3",
            {"num_nextn_predict_layers": 1.5},
            "num_nextn_predict_layers must be a whole number",
        ),
        (
            "gpt_oss",
            {"rope_scaling": {"rope_type": ["yarn"], "factor": 2.0}},
            r"type must be .*found \['yarn'\]|unhashable",
        ),
        (
            "gpt_oss",
            {"rope_scaling": {**YARN, "beta_slow": -1.0}},
            "must be able to compute the frequencies",
        ),
        ("olmo3", {"rope_scaling": {**YARN, "attention_factor": ""}}, "attention_factor"),
        (
            "hunyuan",
            {"rope_scaling": {"type": "dynamic", "alpha": 2.0, "factor": 1.0}, "rope_theta": 10**400},
            "must have finite numbers, found .*rope_theta.*1000",
        ),
        ("qwen3_next", {"linear_num_key_heads": 0}, "linear_num_key_heads=0.* must give .*, found 0 as"),
        ("falcon_h1", {"hidden_size": -1}, "hidden_size=-1 must give a whole number from 1 to 2147483647, found -1"),
        ("granitemoehybrid", {"mamba_d_conv": 0}, "mamba_d_conv=0 must give .*, found 0 as .*mamba_conv_kernel"),
        ("granitemoehybrid", {"mamba_d_state": 2**31}, "mamba_d_state=2147483648 must give a whole number"),
        (
            "phi3",
            {"attention_dropout": -0.1, "resid_pdrop": 1.5},
            "attention_dropout=-0.1 must give a number from 0 to 1, .*\n.*resid_pdrop=1.5 must give a number",
        ),
        ("deepseek_v3", {"routed_scaling_factor": 0.0}, "routed_scaling_factor=0.0 must give a number other than 0, "),
        ("glm4_moe", {"topk_group": 0}, "topk_group must be a positive whole number, found 0"),
        ("deepseek_v2", {"topk_group": 0}, "topk_group must be a positive whole number, found 0"),
        ("granite", {"attention_multiplier": 0.0}, "attention_multiplier=0.0 must give a number above 0, .* found 0.0"),
        ("granite", {"logits_scaling": 0.0}, "logits_scaling=0.0 must give a number other than 0, found 0.0"),
        ("llama", {"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0 must give a number from 0 up, found -1.0 as"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0.0}}, "factor of a rope must be above 0, found 0.0"),
        ("falcon_h1", {"key_multiplier": -0.5}, "key_multiplier=-0.5 must give a number above 0, .* found -"),
        ("qwen3_moe", {"num_experts_per_tok": 1000}, "at most [0-9]+, the number of routed experts, found 1000"),
        ("falcon_h1", {"mamba_d_conv": "4"}, "mamba_d_conv='4' must give a whole number|mamba_d_conv.*expected int"),
    ],
)
def test_values_of_no_sense_are_refused_by_name(case: str, change: Json, message: str, tmp_path: Path) -> None:
    """Values come from a file of any writer, so there is no error of Python, and no endless list."""
    fields = {**zoo.described()[case].hf.to_dict(), "rope_parameters": None, "rope_theta": 1e4, **change}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=message):
        mb.to_transformer_config(tmp_path)


@pytest.mark.parametrize(
    ("case", "old", "new"),
    [
        ("phi3", long_rope("su"), long_rope("longrope")),
        ("nemotron", {"hidden_dropout": 0.0}, {}),
        ("llama4", {"attn_temperature_tuning": 4}, {}),  # transformers 4.51
        ("llama4-other-layers", {"attn_temperature_tuning": 0}, {}),
        ("llama", {"layer_types": ["full_attention"] * 4}, {}),
        ("qwen3_vl", {"image_token_id": None, "video_token_id": None}, {}),  # as transformers 4.52 wrote a text config
    ],
)
def test_what_older_files_say_is_read(case: str, old: Json, new: Json, tmp_path: Path) -> None:
    configs = []
    for change in (old, new):
        (tmp_path / "config.json").write_text(json.dumps({**zoo.described()[case].hf.to_dict(), **change}))
        configs.append(repr(vars(mb.to_transformer_config(tmp_path))))
    assert configs[0] == configs[1]


def test_a_rope_of_mimo_rotates_a_third_of_a_head_if_it_does_not_say_how_much() -> None:
    mimo = pytest.importorskip("transformers.models.mimo_v2_flash.modeling_mimo_v2_flash")
    full = {"partial_rotary_factor": 0.5, "rope_theta": 5e4}
    ropes = {"full_attention": full, "sliding_attention": {"rope_theta": 500.0}}
    fields = zoo.described()["mimo_v2_flash"].hf.to_dict()
    ropes = {kind: {"rope_type": "default", **rope} for kind, rope in ropes.items()}
    hf = AutoConfig.for_model(**{**fields, "head_dim": 24, "rope_parameters": ropes})
    config = mb.to_transformer_config(hf)
    for kind, rope in (("full_attention", config.hf_rope), ("sliding_attention", config.hf_sliding_rope)):
        wanted, _ = mimo.MiMoV2FlashRotaryEmbedding.compute_default_rope_parameters(hf, layer_type=kind)
        assert torch.equal(rope.frequencies(), wanted)


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_ropes_by_layer_may_lack_the_rope_of_a_kind_that_no_layer_has(kind: str) -> None:
    """transformers drops it when it makes the config."""
    if "step3p5" not in CONFIG_MAPPING:
        pytest.skip("the installed transformers lacks it")
    fields = zoo.described()["step3p5"].hf.to_dict()
    fields |= {"layer_types": [kind] * 4, "num_sliding_attention_heads": fields["num_attention_heads"]}
    hf = AutoConfig.for_model(**{name: value for name, value in fields.items() if name != "per_layer_config"})
    assert [*hf.rope_parameters] == [kind]
    config = mb.to_transformer_config(hf)
    assert config.hf_rope == config.hf_sliding_rope
    assert config.hf_rope.theta == hf.rope_parameters[kind]["rope_theta"]


def test_mtp_layers_with_an_embedding_of_their_own_are_refused() -> None:
    hf = zoo.cases()["qwen3_next"].hf
    to_mcore(table_of(hf), {**hf.to_dict(), "mtp_use_dedicated_embeddings": False})
    with pytest.raises(ConfigError, match=r"mtp_use_dedicated_embeddings must be .*share the embedding"):
        to_mcore(table_of(hf), {**hf.to_dict(), "mtp_use_dedicated_embeddings": True})


def test_layer_types_that_do_not_fit_are_refused() -> None:
    hf = CONFIG_MAPPING["qwen3"](num_hidden_layers=2)
    for kinds in (["full_attention"], ["full_attention", "chunked_attention"], None):
        with pytest.raises(ConfigError, match="layer_types must"):
            to_mcore(table_of(hf), {**hf.to_dict(), "layer_types": kinds})
    with pytest.raises(ConfigError, match="sliding_window must be a positive whole number"):
        to_mcore(table_of(hf), {**hf.to_dict(), "layer_types": ["full_attention", "sliding_attention"]})


@pytest.mark.parametrize(
    ("model_type", "change", "window", "layers"),
    [
        ("mistral", {}, (7, 0), None),
        ("mistral", {"sliding_window": None}, None, None),
        ("mistral", {"sliding_window": 1}, (0, 0), None),
        ("qwen2", {}, (7, 0), [0, 1, 1, 1]),
        ("qwen3", {"layer_types": None, "max_window_layers": 2}, (7, 0), [0, 0, 1, 1]),
        ("qwen3", {"layer_types": None, "max_window_layers": 0}, (7, 0), None),
        ("qwen3", {"layer_types": None, "max_window_layers": 4}, None, None),
        ("qwen2", {"layer_types": None, "use_sliding_window": False}, None, None),
    ],
)
def test_windows_are_mcores(model_type: str, change: Json, window: object, layers: object, tmp_path: Path) -> None:
    hf = read({**family(model_type), **change}, tmp_path)
    config = to_transformer_config(hf, table_of(hf))
    assert config.window_size == window
    assert config.window_attn_skip_freq == layers


@pytest.mark.parametrize(
    ("model_type", "change", "expected"),  # expected: add_bias_linear, add_qkv_bias, attention_output_bias
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}, (True, True, True)),
        ("llama", {"attention_bias": True, "mlp_bias": False}, (False, True, True)),
        ("llama", {"attention_bias": False, "mlp_bias": False}, (False, False, False)),
        ("mistral", {}, (False, False, False)),
        ("qwen2", {}, (False, True, False)),
        ("qwen3", {"attention_bias": True}, (False, True, True)),
        ("qwen3", {"attention_bias": False}, (False, False, False)),
    ],
)
def test_biases_are_where_hf_has_them(model_type: str, change: Json, expected: object, tmp_path: Path) -> None:
    hf = read({**family(model_type), **change}, tmp_path)
    config = to_transformer_config(hf, table_of(hf))
    assert (config.add_bias_linear, config.add_qkv_bias, config.attention_output_bias) == expected


def test_the_parameters_of_hf_say_the_same_about_biases(tmp_path: Path) -> None:
    """An oracle for the rows above, and for families with all biases: the names of transformers' own model."""
    from transformers import AutoModelForCausalLM

    biased = (zoo.cases()[name].hf for name in ("phi", "gpt_neox", "gpt_oss"))
    for hf in (*(read(family(model_type), tmp_path / model_type) for model_type in FAMILIES), *biased):
        config = to_transformer_config(hf, table_of(hf))
        with torch.device("meta"):
            names = {name.partition(".0.")[2] for name, _ in AutoModelForCausalLM.from_config(hf).named_parameters()}
        mlp = {"mlp.up_proj.bias", "mlp.fc1.bias", "mlp.dense_h_to_4h.bias", "mlp.experts.gate_up_proj_bias"}
        outputs = {"self_attn.o_proj.bias", "self_attn.dense.bias", "attention.dense.bias"}
        assert bool(names & {"self_attn.q_proj.bias", "attention.query_key_value.bias"}) == config.add_qkv_bias
        assert bool(names & outputs) == config.attention_output_bias
        assert bool(names & mlp) == config.add_bias_linear
        assert bool(names & {"self_attn.q_norm.weight", "self_attn.q_layernorm.weight"}) == config.qk_layernorm


@pytest.mark.parametrize("cap", [True, "30", 0.0, -1.0])
def test_a_soft_cap_that_is_no_positive_number_is_refused(cap: object) -> None:
    field = softcap("attn_logit_softcapping", "attn_softcap")
    assert field.to_mcore({"attn_logit_softcapping": 30.0}) == {"attn_softcap": 30.0}
    with pytest.raises(ConfigError, match="must be None or a positive number"):
        field.to_mcore({"attn_logit_softcapping": cap})


def test_a_list_of_equal_numbers_is_that_number() -> None:
    """The list has one entry for each layer, also for a single layer."""
    field = number("moe_topk", "moe_router_topk")
    for num_layers in (1, 3):
        assert field.to_mcore({"moe_topk": [8] * num_layers, "num_hidden_layers": num_layers}) == {"moe_router_topk": 8}
    with pytest.raises(ConfigError, match="moe_topk must be"):
        field.to_mcore({"moe_topk": [8, 8, 4], "num_hidden_layers": 3})


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({"full_attn_layers": [1]}, "have kda_layers, too, as transformers ignores one list of layers alone, found"),
        ({"full_attn_layers": [1], "kda_layers": [1, 2]}, r"agree with .*'kda_layers': \[1, 2\]}, found"),
    ],
)
def test_lists_of_layers_of_kimi_must_be_complete(lists: Json, message: str) -> None:
    sizes = {"linear_head_dim": 8, "linear_num_heads": 2, "linear_conv_kernel_dim": 4}
    hf = {**sizes, "layer_types": ["linear_attention"] * 2}
    LOW_RANK_KDA[0].to_mcore(hf)
    with pytest.raises(ConfigError, match=f"linear_attn_config must {message}"):
        LOW_RANK_KDA[0].to_mcore({**hf, "linear_attn_config": lists})


@pytest.mark.parametrize(("how", "is_refused"), [("softmax", False), ("sigmoid", True)])
def test_weights_of_sigmoid_scores_that_are_not_normalised_are_refused(how: str, is_refused: bool) -> None:
    hf = {"expert_selection_fn": how, "num_experts_per_tok": 2, "norm_topk_prob": False}
    with pytest.raises(ConfigError, match="norm_topk_prob must be True") if is_refused else nullcontext():
        assert _selected(hf) == {"moe_router_score_function": how}
