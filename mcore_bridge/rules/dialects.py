"""Dialects: HF files hold the routed experts of a layer one by one, or all of them in one tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mcore_bridge.rules.layout import TRANSPOSED, Split
from mcore_bridge.rules.mapping import Dialect, Rule, Rules, pattern_of


def dialect_of(names: Iterable[str], rules: Rules) -> Dialect | None:
    """The dialect of ``names``; None without routed experts, or if both dialects have the same names."""
    split, whole = (
        {name for rule in dialect if rule.axis == "etp" for name in rule.hf} for dialect in (rules, fused(rules))
    )
    if split == whole:
        return None
    stacks = {name.removesuffix("[*]") for name in whole}
    patterns = set(map(pattern_of, names))
    return "fused" if patterns & stacks else "split" if patterns & split else None


def fused(rules: Rules) -> Rules:
    """The rules for files with the routed experts of a layer in one tensor: ``gate_up_proj`` and ``down_proj``.

    Their shape is [experts, out, in], as in transformers 5 and some published checkpoints, or [experts, in, out] if the
    rules are ``turned``. Rules that are already fused do not change.
    """
    return tuple(_fuse(rule) if rule.axis == "etp" and ".experts.*." in rule.hf[0] else rule for rule in rules)


def _fuse(rule: Rule) -> Rule:
    before = rule.hf[0].partition(".experts.*.")[0]
    name, _, kind = rule.mcore.removeprefix(f"{rule.mcore.partition('.experts.')[0]}.experts.*.").rpartition(".")
    first = "up_proj" if rule.hf[0].endswith(".up_proj.weight") else "gate_up_proj"  # a gate comes first
    whole = {"linear_fc1": first, "linear_fc2": "down_proj"}[name] + ("_bias" if kind == "bias" else "")
    layout = rule.layout if len(rule.hf) == 1 else Split(0, (1,) * len(rule.hf)) >> rule.layout
    return replace(rule, hf=(f"{before}.experts.{whole}[*]",), layout=TRANSPOSED >> layout if rule.turned else layout)
