"""Config tables are total and two-way: no field is dropped, and what goes in comes out."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, PretrainedConfig

from mcore_bridge.config.fields import Const, Field, Ignore, Map, require_total, to_hf, to_mcore
from mcore_bridge.config.hf import read_config
from mcore_bridge.config.parallel import ParallelDims
from mcore_bridge.config.rope import rope_of
from mcore_bridge.config.spelling import read_parameters
from mcore_bridge.config.transformer import to_gpt_arguments, to_hf_config, to_transformer_config
from mcore_bridge.errors import ConfigError, MeshError
from mcore_bridge.models.architecture import architecture_of
from tests.families import FAMILIES, ROPES, Json, family, spelling_4, spelling_5, write

NOT_COMPARABLE = ("init_method", "output_layer_init_method", "embedding_init_method")  # new closures in each config
MATTER = {  # fields that must change what is built; raising would not do
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "initializer_range", "rms_norm_eps"),
    *(
        "tie_word_embeddings",
        "attention_dropout",
        "attention_bias",
        "mlp_bias",
        "sliding_window",
        "layer_types",
        "rope_theta",
    ),
}


def _read(fields: Json, folder: Path) -> PretrainedConfig:
    return read_config(write(folder, fields))


def _table(hf: PretrainedConfig) -> tuple[Field, ...]:
    return architecture_of(hf).fields


def _built(hf: PretrainedConfig, table: tuple[Field, ...] | None = None) -> dict[str, object]:
    """All that the table decides, as it arrives: config fields and attributes, ``GPTModel`` arguments, frequencies."""
    table = table or _table(hf)
    config = to_transformer_config(hf, table)
    fields = {name: repr(value) for name, value in vars(config).items() if name not in NOT_COMPARABLE}
    return {**fields, **to_gpt_arguments(hf, table), "frequencies": config.hf_rope.frequencies(1000).tolist()}


def _ignored(table: tuple[Field, ...]) -> set[str]:
    return {name for field in table if isinstance(field, Ignore) for name in field.names}


def _mutated(name: str, value: object) -> object:
    """Another value, of a type that transformers takes for this field."""
    special = {"hidden_act": "relu", "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 3}
    if name in special:
        return special[name]
    match value:
        case bool():
            return not value
        case int() | float():
            return value * 2 or type(value)(1)
        case str():
            return f"other_{value}"
        case list():
            return value[::-1] if value != value[::-1] else [*value, *value]
        case dict():
            return {**value, "other": 1}
    return 3


def _outcome(raw: Json, name: str, base: dict[str, object], folder: Path) -> str:
    """What changing the field does: "changes" what is built, "raises" ConfigError, or "nothing"."""
    value = _mutated(name, raw.get(name, getattr(_read(raw, folder / "base"), name, None)))
    fields = {**raw, name: value}
    if name == "num_hidden_layers" and "layer_types" in raw:
        fields["layer_types"] = raw["layer_types"][:value]
    try:
        return "nothing" if _built(_read(fields, folder / name)) == base else "changes"
    except ConfigError:
        return "raises"


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("config", ["default", "base"])
def test_every_field_of_the_installed_transformers_is_accounted_for(
    model_type: str, config: str, tmp_path: Path
) -> None:
    hf = CONFIG_MAPPING[model_type]() if config == "default" else _read(family(model_type), tmp_path)
    require_total(_table(hf), hf.to_dict())
    assert _built(read_config(hf))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_configs_of_models_and_of_files_that_transformers_saved_are_accounted_for(
    model_type: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    expected = _built(hf := _read(family(model_type), tmp_path))
    for auto in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        with torch.device("meta"):
            model = auto.from_config(hf, dtype=torch.bfloat16, attn_implementation="eager")
        model.config.save_pretrained(tmp_path / "saved")
        assert _built(read_config(model.config)) == _built(read_config(tmp_path / "saved")) == expected


PUBLISHED: dict[str, Json] = {  # what checkpoints of these names hold beyond sizes, as their config.json spells it
    "Llama-2-7b-hf": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "pretraining_tp": 1,
        "rope_scaling": None,
        "torch_dtype": "float16",
        "transformers_version": "4.31.0.dev0",
        "_name_or_path": "meta-llama/Llama-2-7b-hf",
    },
    "Llama-3.1-8B-Instruct": {
        "model_type": "llama",
        "eos_token_id": [128001, 128008, 128009],
        "mlp_bias": False,
        "rope_theta": 5e5,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "rope_type": "llama3",
            "original_max_position_embeddings": 8192,
        },
    },
    "SmolLM2-135M": {
        "model_type": "llama",
        "is_llama_config": True,
        "rope_interleaved": False,
        "tie_word_embeddings": True,
        "rope_theta": 100000,
        "rope_scaling": None,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    },
    "Mistral-7B-v0.1": {
        "model_type": "mistral",
        "sliding_window": 4096,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
    },
    "Mistral-7B-v0.3": {"model_type": "mistral", "sliding_window": None, "rope_theta": 1000000.0},
    "Qwen2.5-7B": {
        "model_type": "qwen2",
        "use_mrope": False,
        "use_sliding_window": False,
        "sliding_window": 131072,
        "max_window_layers": 28,
        "rope_theta": 1000000.0,
    },
    "Qwen3-8B": {
        "model_type": "qwen3",
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 36,
        "head_dim": 128,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "attention_bias": False,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_accounted_for(name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 2}
    fields = PUBLISHED[name]
    hf = _read({**sizes, **fields}, tmp_path)
    built = _built(hf)
    assert built["rotary_base"] == fields.get("rope_theta", 10000.0)
    window = fields["sliding_window"] if fields["model_type"] == "mistral" else None
    assert built["window_size"] == repr(window and (window - 1, 0))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_changing_any_field_changes_the_model_or_raises_or_is_ignored_by_name(model_type: str, tmp_path: Path) -> None:
    raw = family(model_type)
    hf = _read(raw, tmp_path)
    base, ignored = _built(hf), _ignored(_table(hf))
    outcomes = {name: _outcome(raw, name, base, tmp_path) for name in sorted({*hf.to_dict(), *raw})}
    assert {name for name, outcome in outcomes.items() if outcome == "nothing"} <= ignored
    assert {name: outcomes[name] for name in MATTER & outcomes.keys() if outcomes[name] != "changes"} == {}
    assert {name for name in ignored & outcomes.keys() if outcomes[name] == "changes"} == set()


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("missing", [Map, Ignore])
def test_a_table_that_forgets_a_field_is_caught(model_type: str, missing: type, tmp_path: Path) -> None:
    """The planted mistake: drop each entry in turn, and the field that it claimed must be named."""
    hf = _read(family(model_type), tmp_path)
    table = _table(hf)
    for entry in table:
        claimed = set(entry.names) & hf.to_dict().keys()
        if isinstance(entry, missing) and claimed:
            with pytest.raises(ConfigError, match=rf"must be accounted for.*{sorted(claimed)[0]}="):
                to_mcore(tuple(other for other in table if other is not entry), hf.to_dict())


def test_a_mapped_field_that_is_ignored_instead_is_caught(tmp_path: Path) -> None:
    """The planted mistake: rms_norm_eps on the ignore list of a table is what the mutation test finds."""
    raw = family("llama")
    table = _table(_read(raw, tmp_path))
    eps = Ignore("by mistake", ("rms_norm_eps",))
    wrong = tuple(eps if getattr(field, "hf", None) == "rms_norm_eps" else field for field in table)
    changed = _read({**raw, "rms_norm_eps": 1e-3}, tmp_path / "changed")
    assert _built(_read(raw, tmp_path), wrong) == _built(changed, wrong)
    assert _built(_read(raw, tmp_path)) != _built(changed)


def test_an_unknown_field_is_named_with_its_value(tmp_path: Path) -> None:
    hf = _read({**family("qwen3"), "logit_softcap": 30.0, "zeta": "x"}, tmp_path)
    with pytest.raises(ConfigError, match=r"logit_softcap=30.0, zeta='x'.*delete it from the config"):
        to_transformer_config(hf, _table(hf))


def test_tables_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"claimed twice: \['a'\]"):
        to_mcore((Map("a", "x"), Ignore("no use", ("a",))), {"a": 1})
    with pytest.raises(ConfigError, match=r"decided twice: \['x'\]"):
        to_mcore((Map("a", "x"), Const("x", 2)), {"a": 1})
    with pytest.raises(ConfigError, match="a must be set"):
        to_mcore((Map("a", "x"),), {})
    with pytest.raises(ConfigError, match="must hold 'x'"):
        to_hf((Map("a", "x"),), {})


def test_a_table_cannot_set_what_mcore_lacks(tmp_path: Path) -> None:
    hf = _read(family("llama"), tmp_path)
    with pytest.raises(ConfigError, match=r"found \['qk_layernrom'\]"):
        to_transformer_config(hf, (*_table(hf), Const("qk_layernrom", True)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "quick_gelu"}, "hidden_act must be one of .*found 'quick_gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config must be None.*dequantize"),
        ({"is_decoder": True}, "is_decoder must be False"),
        ({"add_cross_attention": True}, "add_cross_attention must be False"),
        ({"auto_map": {"AutoModel": "modeling_x.X"}}, "own modelling code"),
        ({"use_mrope": True}, "use_mrope"),
        ({"mlp_bias": True, "attention_bias": False}, "mlp_bias=True must come with attention_bias=True"),
        ({"num_key_value_heads": 4}, "must be a multiple of num_key_value_heads=4"),
        ({"vocab_size": -3}, "vocab_size must be a positive whole number"),
    ],
)
def test_what_mcore_cannot_express_is_refused_with_the_reason(change: Json, message: str, tmp_path: Path) -> None:
    hf = _read({**family("llama"), **change}, tmp_path)
    with pytest.raises(ConfigError, match=message):
        to_transformer_config(hf, _table(hf))


def test_layer_types_that_do_not_fit_are_refused() -> None:
    hf = CONFIG_MAPPING["qwen3"](num_hidden_layers=2)
    for kinds in (["full_attention"], ["full_attention", "chunked_attention"], None):
        with pytest.raises(ConfigError, match="layer_types must"):
            to_mcore(_table(hf), {**hf.to_dict(), "layer_types": kinds})
    with pytest.raises(ConfigError, match="sliding_window must be a positive whole number"):
        to_mcore(_table(hf), {**hf.to_dict(), "layer_types": ["full_attention", "sliding_attention"]})


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
    hf = _read({**family(model_type), **change}, tmp_path)
    config = to_transformer_config(hf, _table(hf))
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
    hf = _read({**family(model_type), **change}, tmp_path)
    config = to_transformer_config(hf, _table(hf))
    assert (config.add_bias_linear, config.add_qkv_bias, config.attention_output_bias) == expected


def test_the_parameters_of_hf_say_the_same_about_biases(tmp_path: Path) -> None:
    """An oracle for the rows above: the bias names of transformers' own model."""
    from transformers import AutoModelForCausalLM

    for model_type in FAMILIES:
        hf = _read(family(model_type), tmp_path / model_type)
        config = to_transformer_config(hf, _table(hf))
        with torch.device("meta"):
            names = dict(AutoModelForCausalLM.from_config(hf).named_parameters())
        layer = "model.layers.0."
        assert (f"{layer}self_attn.q_proj.bias" in names) == (config.add_qkv_bias or config.add_bias_linear)
        assert (f"{layer}self_attn.o_proj.bias" in names) == config.attention_output_bias
        assert (f"{layer}mlp.up_proj.bias" in names) == config.add_bias_linear
        assert (f"{layer}self_attn.q_norm.weight" in names) == config.qk_layernorm


@st.composite
def checkpoints(draw: st.DrawFn) -> Json:
    """Config files of all families, spellings and geometries, with derived, explicit and None fields."""
    groups, ratio, size = draw(st.tuples(*[st.sampled_from([1, 2, 3, 4])] * 3))
    num_layers, model_type = draw(st.integers(1, 6)), draw(st.sampled_from(FAMILIES))
    fields: Json = {
        "model_type": model_type,
        "vocab_size": draw(st.integers(2, 500)),
        "hidden_size": groups * ratio * 2 * size,
        "intermediate_size": draw(st.integers(1, 99)),
        "num_hidden_layers": num_layers,
        "num_attention_heads": groups * ratio,
        "max_position_embeddings": draw(st.integers(64, 512)),
        "num_key_value_heads": draw(st.sampled_from([groups, groups * ratio])),
        "head_dim": draw(st.sampled_from([4, 16, 128])),
        "tie_word_embeddings": draw(st.booleans()),
        "rms_norm_eps": draw(st.floats(1e-8, 1e-2)),
        "initializer_range": draw(st.floats(1e-4, 1.0)),
        "hidden_act": draw(st.sampled_from(["silu", "gelu", "relu", "gelu_new", "gelu_pytorch_tanh"])),
        "attention_dropout": draw(st.sampled_from([0.0, 0.1])),
    }
    if model_type != "qwen3" and draw(st.booleans()):
        fields["head_dim"] = None
    if draw(st.booleans()):
        fields.pop("num_key_value_heads" if model_type == "llama" else "attention_dropout")
    if model_type in ("llama", "qwen3"):
        fields["attention_bias"] = draw(st.booleans())
    if model_type == "llama":
        fields["mlp_bias"] = fields["attention_bias"] and draw(st.booleans())
    if model_type != "llama":
        fields["sliding_window"] = draw(st.sampled_from([None, 1, 8]))
    if model_type.startswith("qwen"):
        fields |= {"use_sliding_window": fields["sliding_window"] is not None}
        fields |= {"max_window_layers": draw(st.integers(0, num_layers))}
    spelling = draw(st.sampled_from([spelling_4, spelling_5]))
    return fields | spelling(draw(st.sampled_from(sorted(ROPES))), draw(st.sampled_from([1e4, 5e5])))


def _expected(hf: PretrainedConfig, name: str) -> object:
    """The field of ``hf`` with what HF derives filled in, and with synonyms and windows that no layer has folded."""
    value = getattr(hf, name, None)
    match name:
        case "head_dim":
            return value or hf.hidden_size // hf.num_attention_heads
        case "hidden_act":
            return {"gelu_new": "gelu_pytorch_tanh"}.get(value, value)
        case "sliding_window" if "sliding_attention" not in getattr(hf, "layer_types", ["sliding_attention"]):
            return None
        case "rope_parameters":
            return read_parameters(hf.to_dict())
    return value


@given(checkpoints())
def test_hf_to_mcore_to_hf_is_the_identity(fields: Json) -> None:
    hf = read_config(CONFIG_MAPPING[fields["model_type"]].from_dict(json.loads(json.dumps(fields))))
    table = _table(hf)
    back = to_hf_config(to_transformer_config(hf, table), to_gpt_arguments(hf, table), table)
    assert back == {name: _expected(hf, name) for name in back}
    mapped = {name for name in fields if name in hf.to_dict()} - _ignored(table)
    assert mapped - {"model_type", "rope_parameters", "rope_theta", "rope_scaling"} <= back.keys()


@given(checkpoints())
def test_what_comes_back_is_read_alike(fields: Json) -> None:
    """mcore to HF to mcore is the identity on what HF configs reach."""
    hf = read_config(CONFIG_MAPPING[fields["model_type"]].from_dict(json.loads(json.dumps(fields))))
    table = _table(hf)
    back = to_hf_config(to_transformer_config(hf, table), to_gpt_arguments(hf, table), table)
    if "layer_types" in back:
        back["use_sliding_window"] = back["sliding_window"] is not None
    again = read_config(CONFIG_MAPPING[hf.model_type].from_dict(back))
    assert _built(again) == _built(hf)


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("rope_type", ROPES)
def test_both_spellings_of_a_config_file_are_one_config(model_type: str, rope_type: str, tmp_path: Path) -> None:
    plain = {name: value for name, value in family(model_type).items() if "rope" not in name and name != "torch_dtype"}
    old = _read({**plain, **spelling_4(rope_type)}, tmp_path / "4")
    new = _read({**plain, **spelling_5(rope_type)}, tmp_path / "5")
    assert _built(old) == _built(new)
    assert rope_of(old) == rope_of(new)
    assert old.dtype == new.dtype == torch.bfloat16
    assert old.to_dict() | {"_name_or_path": ""} == new.to_dict() | {"_name_or_path": ""}


def test_a_config_object_in_the_other_spelling_is_translated(tmp_path: Path) -> None:
    plain = {name: value for name, value in family("llama").items() if "rope" not in name}
    new = CONFIG_MAPPING["llama"](**{**plain, **spelling_5("yarn")})
    assert rope_of(read_config(new)) == rope_of(_read({**plain, **spelling_4("yarn")}, tmp_path))


def test_read_config_copies(tmp_path: Path) -> None:
    hf = _read(family("llama"), tmp_path)
    copy = read_config(hf)
    copy.num_hidden_layers = 99
    assert hf.num_hidden_layers == 4


def test_read_config_finds_the_local_cache_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    repository = tmp_path / "models--owner--name"
    write(repository / "snapshots" / "abc", family("qwen3"))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert read_config("owner/name").model_type == "qwen3"
    for name in ("owner/other", "/no/such/folder", "a/b/c", ""):
        with pytest.raises(ConfigError):
            read_config(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "must hold a config.json, found none"),
        ("{", "must be valid JSON"),
        ("[]", "must hold a JSON object, found a list"),
        ("{}", "must name a model_type, found None"),
        ('{"model_type": "qwen33"}', "found 'qwen33'. Nearest names: qwen3"),
        ('{"model_type": "llama", "rope_scaling": 3}', "refuses it"),
    ],
)
def test_a_bad_folder_is_one_clear_error(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)


def test_a_file_instead_of_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Give its folder"):
        read_config(write(tmp_path, family("llama")) / "config.json")


def test_overrides_come_last_and_may_be_none(tmp_path: Path) -> None:
    hf = _read(family("llama"), tmp_path)
    overrides = {"num_layers": 2, "hidden_dropout": 0.2, "recompute_granularity": None, "parallel_output": False}
    config = to_transformer_config(hf, _table(hf), overrides=overrides)
    arguments = to_gpt_arguments(hf, _table(hf), overrides=overrides)
    assert (config.num_layers, config.hidden_dropout, config.recompute_granularity) == (2, 0.2, None)
    assert arguments["parallel_output"] is False
    assert to_hf_config(config, arguments, _table(hf))["num_hidden_layers"] == 2
    assert to_transformer_config(hf, _table(hf), overrides={"kv_channels": None}).kv_channels == 8
    assert to_transformer_config(hf, _table(hf), overrides={"kv_channels": None}).hf_rope.head_dim == 8


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
    hf = _read(family("llama"), tmp_path)
    for function in (to_transformer_config, to_gpt_arguments):
        with pytest.raises(ConfigError, match=message):
            function(hf, _table(hf), overrides={name: 1})


def test_every_field_of_the_mesh_is_refused_as_an_override(tmp_path: Path) -> None:
    hf = _read(family("llama"), tmp_path)
    for name in ParallelDims().to_config_fields():
        with pytest.raises(ConfigError, match="the mesh decides it"):
            to_transformer_config(hf, _table(hf), overrides={name: 1})


def test_an_override_takes_a_config_out_of_hf_only_with_an_error(tmp_path: Path) -> None:
    hf = _read(family("llama"), tmp_path)
    config = to_transformer_config(hf, _table(hf), overrides={"normalization": "LayerNorm"})
    with pytest.raises(ConfigError, match="normalization must be 'RMSNorm'"):
        to_hf_config(config, to_gpt_arguments(hf, _table(hf)), _table(hf))


def test_windows_must_cover_the_layers(tmp_path: Path) -> None:
    hf = _read(family("qwen3"), tmp_path)
    assert to_transformer_config(hf, _table(hf), overrides={"num_layers": 2}).num_layers == 2
    with pytest.raises(ConfigError, match="Override it together with num_layers"):
        to_transformer_config(hf, _table(hf), overrides={"num_layers": 5})


@pytest.mark.parametrize(("tp", "padded"), [(1, 97), (2, 98), (6, 102)])
def test_the_vocabulary_is_padded_to_tp(tp: int, padded: int, tmp_path: Path) -> None:
    hf = _read(family("llama"), tmp_path)
    dims = ParallelDims(tp=tp)
    arguments = to_gpt_arguments(hf, _table(hf), dims=dims)
    assert arguments["vocab_size"] == padded
    config = to_transformer_config(hf, _table(hf), dims=dims)
    assert to_hf_config(config, arguments, _table(hf))["vocab_size"] == config.hf_vocab_size == 97
    assert to_gpt_arguments(hf, _table(hf), dims=dims, overrides={"vocab_size": 120})["vocab_size"] == 120
    for wrong in (96, 60, *([] if tp == 1 else [121])):
        with pytest.raises(ConfigError, match=f"a multiple of tp={tp} and at least the 97"):
            to_gpt_arguments(hf, _table(hf), dims=dims, overrides={"vocab_size": wrong})


def test_a_mesh_that_does_not_divide_the_model_is_refused(tmp_path: Path) -> None:
    hf = _read(family("llama"), tmp_path)
    with pytest.raises(MeshError, match="must divide num_attention_heads=6"):
        to_transformer_config(hf, _table(hf), dims=ParallelDims(tp=4))
    with pytest.raises(MeshError, match="must divide num_query_groups=2"):
        to_transformer_config(hf, _table(hf), dims=ParallelDims(tp=3))
    with pytest.raises(MeshError, match="must divide ffn_hidden_size=72"):
        to_transformer_config(hf, _table(hf), dims=ParallelDims(tp=5), overrides={"num_attention_heads": 10})
    assert to_transformer_config(hf, _table(hf), dims=ParallelDims(tp=6)).tensor_model_parallel_size == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_decides_parameters_and_messages(dtype: torch.dtype, tmp_path: Path) -> None:
    hf = _read(family("llama"), tmp_path)
    config = to_transformer_config(hf, _table(hf), dtype=dtype)
    assert config.params_dtype == config.pipeline_dtype == dtype
    assert (config.bf16, config.fp16) == (dtype == torch.bfloat16, dtype == torch.float16)


def test_other_dtypes_and_what_mcore_refuses_are_config_errors(tmp_path: Path) -> None:
    hf = _read(family("llama"), tmp_path)
    with pytest.raises(ConfigError, match=r"found torch.float64"):
        to_transformer_config(hf, _table(hf), dtype=torch.float64)
    with pytest.raises(ConfigError, match="megatron-core refuses"):
        to_transformer_config(hf, _table(hf), overrides={"recompute_granularity": "nonsense"})
    assert to_transformer_config(hf, _table(hf), overrides={"variable_seq_lengths": True}).variable_seq_lengths


def test_configs_can_be_copied(tmp_path: Path) -> None:
    import copy

    hf = _read(family("llama", "yarn"), tmp_path)
    config = to_transformer_config(hf, _table(hf))
    twin = copy.deepcopy(config)
    assert twin.hf_rope == config.hf_rope
    assert to_hf_config(twin, to_gpt_arguments(hf, _table(hf)), _table(hf))
    assert dataclasses.is_dataclass(twin.hf_rope)
