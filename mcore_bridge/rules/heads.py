"""Rules of output layers: separate LM heads, heads that are tied to the embedding, and score heads."""

from __future__ import annotations

from dataclasses import replace

from mcore_bridge.errors import ConfigError
from mcore_bridge.rules.layout import REPLICATED, VOCAB
from mcore_bridge.rules.mapping import Prefixes, Rules, embedding_rules, respelled, table

KINDS = ("lm", "value", "classification", "none")
HEAD = "lm_head.weight"
# fmt: off
LM_HEAD    = table(("output_layer.weight", HEAD,             VOCAB))
SCORE_HEAD = table(("output_layer.weight", "score.weight",   REPLICATED),
                   ("output_layer.bias",   "score.bias",     REPLICATED))
# fmt: on


def check_head(head: object) -> None:
    """Raise ``ConfigError`` unless ``head`` is a known one."""
    if head not in KINDS:
        raise ConfigError(f"head must be one of {', '.join(KINDS)}, found {head!r}")


def lm_head_of(rules: Rules, spelling: Prefixes = ()) -> Rules:
    """The rules of an untied output layer: its rules in ``rules``, else ``LM_HEAD`` in this spelling."""
    own = tuple(rule for rule in rules if rule.mcore.startswith("output_layer.") and not rule.copy)
    return own or respelled(LM_HEAD, spelling)


def tied_lm_head(rules: Rules) -> Rules:
    """Rules for an output layer that is the word embedding."""
    return tuple(replace(rule, mcore="output_layer.weight", exported=False) for rule in embedding_rules(rules))


def redundant_head(rules: Rules, lm_head: str = HEAD) -> Rules:
    """Rules for a tied embedding that a file stores as ``lm_head.weight``, alone or in addition."""
    return tuple(replace(rule, hf=(lm_head,), exported=False, copy=True) for rule in embedding_rules(rules))
