"""Config tables are total: no field of any HF config is dropped, and the tests for it can fail."""

from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

from mcore_bridge.config.fields import Const, Ignore, Map, require_total, to_hf, to_mcore
from mcore_bridge.config.hf import read_config
from mcore_bridge.config.transformer import to_transformer_config
from mcore_bridge.errors import ConfigError
from tests.support.families import FAMILIES, Json, built, family, ignored_by, read, table_of

MATTER = {  # fields that must change the model; an error would be wrong
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


def _mutated(name: str, value: object) -> object:
    """Another value, of a type that transformers accepts for this field."""
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
            return {**value, "rope_theta": 7.5}
    return 3


def _outcome(raw: Json, name: str, base: dict[str, object], folder: Path) -> str:
    """The effect of another value of the field: "changes" (of the model), "raises" (ConfigError) or "nothing"."""
    value = _mutated(name, raw.get(name, getattr(read(raw, folder / "base"), name, None)))
    fields = {**raw, name: value}
    if name == "num_hidden_layers" and "layer_types" in raw:
        fields["layer_types"] = raw["layer_types"][:value]
    try:
        return "nothing" if built(read(fields, folder / name)) == base else "changes"
    except ConfigError:
        return "raises"


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("config", ["default", "base"])
def test_every_field_of_the_installed_transformers_is_accounted_for(
    model_type: str, config: str, tmp_path: Path
) -> None:
    hf = CONFIG_MAPPING[model_type]() if config == "default" else read(family(model_type), tmp_path)
    require_total(table_of(hf), hf.to_dict())
    assert built(read_config(hf))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_configs_of_models_and_of_files_that_transformers_saved_are_accounted_for(
    model_type: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    expected = built(hf := read(family(model_type), tmp_path))
    for auto in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        with torch.device("meta"):
            model = auto.from_config(hf, dtype=torch.bfloat16, attn_implementation="eager")
        model.config.save_pretrained(tmp_path / "saved")
        assert built(read_config(model.config)) == built(read_config(tmp_path / "saved")) == expected


@pytest.mark.parametrize("model_type", FAMILIES)
def test_changing_any_field_changes_the_model_or_raises_or_is_ignored_by_name(model_type: str, tmp_path: Path) -> None:
    raw = family(model_type)
    hf = read(raw, tmp_path)
    base, ignored = built(hf), ignored_by(table_of(hf))
    outcomes = {name: _outcome(raw, name, base, tmp_path) for name in sorted({*hf.to_dict(), *raw})}
    assert {name for name, outcome in outcomes.items() if outcome == "nothing"} <= ignored
    assert {name: outcomes[name] for name in MATTER & outcomes.keys() if outcomes[name] != "changes"} == {}
    assert {name for name in ignored & outcomes.keys() if outcomes[name] == "changes"} == set()


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("missing", [Map, Ignore])
def test_a_table_that_forgets_a_field_is_caught(model_type: str, missing: type, tmp_path: Path) -> None:
    """The planted mistake: drop each entry in turn, and the field that it claimed must be named."""
    hf = read(family(model_type), tmp_path)
    table = table_of(hf)
    for entry in table:
        claimed = set(entry.names) & hf.to_dict().keys()
        if isinstance(entry, missing) and claimed:
            with pytest.raises(ConfigError, match=rf"must be accounted for.*{sorted(claimed)[0]}="):
                to_mcore(tuple(other for other in table if other is not entry), hf.to_dict())


def test_a_mapped_field_that_is_ignored_instead_is_caught(tmp_path: Path) -> None:
    """The planted mistake: a table ignores rms_norm_eps, and the mutation test must find it."""
    raw = family("llama")
    table = table_of(read(raw, tmp_path))
    eps = Ignore("by mistake", ("rms_norm_eps",))
    wrong = tuple(eps if getattr(field, "hf", None) == "rms_norm_eps" else field for field in table)
    changed = read({**raw, "rms_norm_eps": 1e-3}, tmp_path / "changed")
    assert built(read(raw, tmp_path), wrong) == built(changed, wrong)
    assert built(read(raw, tmp_path)) != built(changed)


def test_an_unknown_field_is_named_with_its_value(tmp_path: Path) -> None:
    hf = read(family("qwen3"), tmp_path)
    table = tuple(entry for entry in table_of(hf) if not {"attention_bias", "rms_norm_eps"} & {*entry.names})
    with pytest.raises(ConfigError, match=r"attention_bias=True, rms_norm_eps=1e-05.*delete it from the config"):
        to_transformer_config(hf, table)


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
    hf = read(family("llama"), tmp_path)
    with pytest.raises(ConfigError, match=r"found \['qk_layernrom'\]"):
        to_transformer_config(hf, (*table_of(hf), Const("qk_layernrom", True)))
