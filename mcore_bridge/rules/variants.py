"""Rules of output layers: heads of their own, heads that are the embedding, and those that give scores.

Dialects: HF files hold the routed experts of a layer one by one, or all of them in one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mcore_bridge.errors import ConfigError
from mcore_bridge.rules.layout import REPLICATED, TRANSPOSED, VOCAB, Split
from mcore_bridge.rules.mapping import Dialect, Prefixes, Rule, Rules, embedding_rules, pattern_of, respelled, table

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
    """The rules of an output layer that is no embedding: those among ``rules``, else ``LM_HEAD`` in this spelling."""
    own = tuple(rule for rule in rules if rule.mcore.startswith("output_layer.") and not rule.copy)
    return own or respelled(LM_HEAD, spelling)


def tied_lm_head(rules: Rules) -> Rules:
    """Rules for an output layer that is the word embedding."""
    return tuple(replace(rule, mcore="output_layer.weight", exported=False) for rule in embedding_rules(rules))


def redundant_head(rules: Rules, lm_head: str = HEAD) -> Rules:
    """Rules for a tied embedding that a file stores as ``lm_head.weight``, instead of its own name or too."""
    return tuple(replace(rule, hf=(lm_head,), exported=False, copy=True) for rule in embedding_rules(rules))


def dialect_of(names: Iterable[str], rules: Rules) -> Dialect | None:
    """The dialect of ``names``; None if they have no routed experts, or if both dialects name them alike."""
    split, whole = (
        {name for rule in dialect if rule.axis == "etp" for name in rule.hf} for dialect in (rules, fused(rules))
    )
    if split == whole:
        return None
    stacks = {name.removesuffix("[*]") for name in whole}
    patterns = set(map(pattern_of, names))
    return "fused" if patterns & stacks else "split" if patterns & split else None


def fused(rules: Rules) -> Rules:
    """The same rules with the routed experts of a layer in one tensor: ``gate_up_proj`` and ``down_proj``.

    Their shape is [experts, out, in], as in transformers 5 and some published checkpoints, or [experts, in, out] if the
    rules are ``turned``. Rules that are fused already stay as they are.
    """
    return tuple(_fuse(rule) if rule.axis == "etp" and ".experts.*." in rule.hf[0] else rule for rule in rules)


def _fuse(rule: Rule) -> Rule:
    before = rule.hf[0].partition(".experts.*.")[0]
    name, _, kind = rule.mcore.removeprefix(f"{rule.mcore.partition('.experts.')[0]}.experts.*.").rpartition(".")
    first = "up_proj" if rule.hf[0].endswith(".up_proj.weight") else "gate_up_proj"  # with a gate, that comes first
    whole = {"linear_fc1": first, "linear_fc2": "down_proj"}[name] + ("_bias" if kind == "bias" else "")
    layout = rule.layout if len(rule.hf) == 1 else Split(0, (1,) * len(rule.hf)) >> rule.layout
    return replace(rule, hf=(f"{before}.experts.{whole}[*]",), layout=TRANSPOSED >> layout if rule.turned else layout)
