"""Trainers change a config in place: the changes pass the checks of overrides, and the config stays one object."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mcore_bridge as mb
from mcore_bridge.factory.blueprint import Blueprint, BuildOptions, changes_of, make_blueprint, reconcile
from tests.support.strategies import tiny

HF = tiny("qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=2)
YARN = tiny("llama", rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8})
CHANGES: dict[str, list[object]] = {
    "bf16": [True, False],
    "hidden_dropout": [0.0, 0.25],
    "kv_channels": [8, 12],
    "layernorm_epsilon": [1e-5, 1e-3],
    "num_layers": [2, 4],
    "moe_enable_routing_replay": [True],
    "recompute_granularity": [None, "selective"],
    "rotary_base": [10_000, 500],
    "max_sequence_length": [17],
}


def blueprint_of(hf: Any = HF, **overrides: object) -> Blueprint:
    return make_blueprint(hf, BuildOptions(dims=mb.ParallelDims(tp=2), dtype=torch.bfloat16, overrides=overrides))


def values(blueprint: Blueprint) -> dict[str, object]:
    """All fields in which two blueprints of one model could differ, except functions that each blueprint creates."""
    held = {**vars(blueprint.config), **blueprint.gpt_arguments}
    return {name: value for name, value in held.items() if not callable(value)}


def set_on(blueprint: Blueprint, fields: dict[str, object]) -> None:
    for name, value in fields.items():
        setattr(blueprint.config, name, value)


changes = st.fixed_dictionaries({}, optional={name: st.sampled_from(each) for name, each in CHANGES.items()})


@settings(max_examples=8)
@given(changes, changes, changes)
def test_what_is_set_on_a_config_is_an_override(first: Any, second: Any, third: Any) -> None:
    drawn = blueprint_of(**first)
    config = drawn.config
    set_on(drawn, second)
    settled = reconcile(drawn)
    assert values(settled) == values(blueprint_of(**{**first, **second}))
    set_on(settled, third)
    settled = reconcile(settled)
    assert settled.config is config
    assert values(settled) == values(blueprint_of(**{**first, **second, **third}))
    assert reconcile(settled) is settled


def test_what_follows_from_a_change_is_set_too() -> None:
    drawn = blueprint_of()
    drawn.config.kv_channels = 12
    assert reconcile(drawn).config.hf_rope.head_dim == 12
    assert drawn.config.hf_rope.head_dim == 12


def test_a_head_unties_the_model_and_keeps_the_object() -> None:
    drawn = blueprint_of(tiny("llama", tie_word_embeddings=True))
    assert drawn.gpt_arguments["share_embeddings_and_output_weights"] is True
    settled = reconcile(drawn, head="value")
    assert settled.gpt_arguments["share_embeddings_and_output_weights"] is False
    assert (settled.provenance.head, settled.config) == ("value", drawn.config)
    assert settled.config is drawn.config


def test_an_attribute_of_a_trainer_stays() -> None:
    drawn = blueprint_of()
    drawn.config.enable_routing_replay = True
    assert changes_of(drawn) == {}
    assert reconcile(drawn).config.enable_routing_replay is True


@pytest.mark.parametrize(
    ("hf", "name", "value", "message"),
    [
        (HF, "tensor_model_parallel_size", 4, r"ParallelDims\(tp=...\)"),
        (HF, "sequence_parallel", True, r"ParallelDims\(sp=...\)"),
        (HF, "hf_rope", None, "must be a TransformerConfig field"),
        (HF, "hf_vocab_size", 7, "must be a TransformerConfig field"),
        (HF, "transformer_layer_spec", object(), "build_model decides it"),
        (HF, "vocab_size", 8, "vocab_size must be"),
        (HF, "ffn_hidden_size", 81, "tp=2 must divide ffn_hidden_size=81"),
        (YARN, "apply_rope_fusion", True, "apply_rope_fusion must be False"),
        (tiny("llama", hidden_act="gelu"), "bias_activation_fusion", True, "bias_activation_fusion must be False"),
        (HF, "fp8_param", True, "fp8_param needs fp8, found no fp8"),
        (HF, "fp4_param", True, "fp4_param must be False"),
    ],
)
def test_a_change_that_makes_another_model_is_refused(hf: Any, name: str, value: object, message: str) -> None:
    drawn = blueprint_of(hf)
    setattr(drawn.config, name, value)
    with pytest.raises(mb.BridgeError, match=message):
        reconcile(drawn)


def test_every_field_of_a_drawn_config_is_noted() -> None:
    """If a field were not compared, its change would not be checked."""
    drawn = blueprint_of()
    assert {field.name for field in dataclasses.fields(drawn.config)} <= drawn.initial.keys()
    assert changes_of(drawn) == {}
