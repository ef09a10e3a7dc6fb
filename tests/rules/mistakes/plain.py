"""Planted mistakes for the families of ``zoo/plain.py``: in fused projections, norms, MLPs, rope, temperature."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import PropertyMock, patch

import torch.nn.functional as F  # noqa: N812

from mcore_bridge import architecture
from mcore_bridge.config.fields import Const, Derive, Field
from mcore_bridge.config.rope import Rope
from mcore_bridge.config.tables import but
from mcore_bridge.factory.modules import norms, temperature
from mcore_bridge.factory.modules.temperature import Temperature
from mcore_bridge.rules.layout import COLUMN, GATED_UP, QKV, REPLICATED, Layout, Rearrange, Split
from tests.support.bounds import ONE
from tests.support.mutants import exchange, instead, laid_out, of
from tests.support.strategies import tiny

FUSED = tiny("phi3", vocab_size=97, num_hidden_layers=2, hidden_size=64, head_dim=8, pad_token_id=0)
PLAIN = tiny("starcoder2", vocab_size=97, num_hidden_layers=2, hidden_size=64, head_dim=8)


@dataclass(frozen=True)
class SwapLast(Layout):
    """The last two parts in the other order."""

    def __call__(self, parts, axes):
        return (*parts[:-2], parts[-1], parts[-2])

    def __invert__(self):
        return self


DEALT = Rearrange("(n tp) ...", "tp n ...")
HALVES = Split(0, (1, 1))
DEALT_UP = HALVES >> DEALT >> GATED_UP.steps[1]
UP_FIRST = HALVES >> SwapLast() >> GATED_UP
V_FIRST = Split(0, ("heads_per_group", 1, 1)) >> SwapLast() >> QKV
LAST_NORM = ("final_layernorm.bias", "final_layernorm.weight")
LAYER_NORMS = ("input_layernorm.bias", "mlp_layernorm.bias")

# fmt: off
RULES = {
    # name                             killed by, model          mutation of the rules
    "qkv by groups already":           ("logits", FUSED,         of("qkv.weight", laid_out(COLUMN))),
    "v before k":                      ("logits", FUSED,         of("qkv.weight", laid_out(V_FIRST))),
    "gate and up not split":           ("logits at tp=2", FUSED, of("fc1.weight", laid_out(COLUMN))),
    "up before gate":                  ("logits", FUSED,         of("fc1.weight", laid_out(UP_FIRST))),
    "gate and up dealt out":           ("logits at tp=2", FUSED, of("fc1.weight", laid_out(DEALT_UP))),
    "one norm's bias for another's":   ("logits", PLAIN,         exchange(*LAYER_NORMS)),
    "a norm's bias for its weight":    ("logits", PLAIN,         exchange(*LAST_NORM)),
    "up dealt out":                    ("logits at tp=2", PLAIN, of("fc1.weight", laid_out(DEALT))),
    "bias of up replicated":           ("shapes at tp=2", PLAIN, of("fc1.bias", laid_out(REPLICATED))),
    "bias of down cut":                ("shapes at tp=2", PLAIN, of("fc2.bias", laid_out(COLUMN))),
    "bias of the last norm forgotten": ("no rule", PLAIN,        of(LAST_NORM[0], lambda rule: None)),
}
# fmt: on


@contextlib.contextmanager
def entries(model_type: str, *wrong: Field) -> Iterator[None]:
    """The family with these entries added to its table."""
    true = architecture.architecture_of(model_type)
    architecture._REGISTRY[model_type] = replace(true, fields=but(true.fields, *wrong))
    try:
        yield
    finally:
        architecture._REGISTRY[model_type] = true


def derived(name: str, forward: Callable[[Any], dict[str, object]]) -> Derive:
    return Derive((name,), forward, lambda mcore: {})


def activation(function: Callable[..., Any]) -> Derive:
    return derived("hidden_act", lambda hf: {"activation_func": function})


def always(name: str, value: object) -> Any:
    """Every rope has this value."""
    return patch.object(Rope, name, new_callable=PropertyMock, return_value=value)


def one_place_late(self: Temperature, places: Any) -> Any:
    return TRUE_TEMPERATURE(self, places - 1)


def rotated(config: Any, number: int) -> bool:
    return not config.no_rope_freq[number]


def in_chunks(sizes: list[int]) -> Any:
    names = ("layer_types", "attention_chunk_size")
    return entries("llama4_text", Derive(names, lambda hf: {"attention_chunks": sizes}, lambda mcore: {}))


SOFTMAX = (Const("moe_router_score_function", "softmax"), Const("moe_router_pre_softmax", True))
TRUE_TEMPERATURE = Temperature.__call__
MODULES: dict[str, tuple[str, Any, Callable[[], Any]]] = {
    "halves rotated, not neighbours": ("helium", ONE, lambda: entries("helium", Const("rotary_interleaved", False))),
    "neighbours rotated, not halves": ("arcee", ONE, lambda: entries("arcee", Const("rotary_interleaved", True))),
    "a norm not around one": (
        "nemotron",
        ONE,
        lambda: entries("nemotron", Const("layernorm_zero_centered_gamma", False)),
    ),
    "another epsilon": (
        "starcoder2",
        ONE,
        lambda: entries("starcoder2", derived("norm_epsilon", lambda hf: {"layernorm_epsilon": 1e-2})),
    ),
    "relu, not squared": ("arcee", ONE, lambda: entries("arcee", activation(F.relu))),
    "gelu without tanh": ("starcoder2", ONE, lambda: entries("starcoder2", activation(F.gelu))),
    "rope in every layer": (
        "smollm3",
        ONE,
        lambda: entries("smollm3", derived("no_rope_layers", lambda hf: {"no_rope_freq": None})),
    ),
    "rope in the other layers": (
        "smollm3",
        ONE,
        lambda: entries("smollm3", derived("no_rope_layers", lambda hf: {"no_rope_freq": hf["no_rope_layers"]})),
    ),
    "whole heads rotated": ("phi3-partial", ONE, lambda: always("rotary_dim", 16)),
    "longrope for short texts only": ("phi3-longrope-beyond", ONE, lambda: always("longest_plain", float("inf"))),
    "longrope without its attention factor": ("phi3-longrope-within", ONE, lambda: always("attention_factor", 1.0)),
    "no temperature": ("ministral3", ONE, lambda: always("query_temperature", None)),
    "temperature one place late": ("ministral3", ONE, instead(Temperature, "__call__", one_place_late)),
    "other chunks": ("llama4", ONE, lambda: in_chunks([6, 0, 6, 0])),
    "chunks in the other layers": ("llama4", ONE, lambda: in_chunks([0, 5, 0, 5])),
    "a temperature in layers with a rope": ("llama4", ONE, instead(temperature, "is_unrotated", rotated)),
    "norms in layers without a rope": (
        "llama4",
        ONE,
        instead(norms, "is_unrotated", lambda config, number: False),
    ),
    "no norms in layers with a rope": ("llama4", ONE, instead(norms.UnitNorm, "forward", lambda self, x: x)),
    "experts scaled behind": ("llama4", ONE, lambda: entries("llama4_text", Const("moe_apply_probs_on_input", False))),
    "a softmax of experts": ("llama4", ONE, lambda: entries("llama4_text", *SOFTMAX)),
}
LEAST = 10
"""Each of these mistakes changes the logits by more than this many times the bound."""
