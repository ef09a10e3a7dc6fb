"""The variants in which files store one model: its head, its experts, its names, and the orientation of stacked
experts.

- The output layer may be an untied head, the embedding, or a head that gives scores.
- *Expert formats*: the routed experts of a layer are stored one by one, or all of them in one tensor.
- Models without their head, such as embedding models, are saved without the prefix: `layers.0.` instead of
  `model.layers.0.`. transformers adds the prefix if it reads such a file into a model with a head.
- A tied embedding may be stored only under the name of the head.
- Published files of Qwen3-VL with experts have stacks [experts, in, out], and transformers 5 writes [experts, out, in]
  under equal names. transformers recognizes both by their shapes, and so do we.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from torch import Tensor

from mcore_bridge.errors import ConfigError
from mcore_bridge.rules.layout import REPLICATED, TRANSPOSED, VOCAB, Split, upright
from mcore_bridge.rules.mapping import (
    ExpertFormat,
    Prefixes,
    Rule,
    Rules,
    WeightMapping,
    embedding_names,
    embedding_rules,
    pattern_of,
    respelled,
    table,
)

KINDS = ("lm", "value", "classification", "process_reward", "none")
HEAD = "lm_head.weight"
# fmt: off
LM_HEAD    = table(("output_layer.weight", HEAD,             VOCAB))
SCORE_HEAD = table(("output_layer.weight", "score.weight",   REPLICATED),
                   ("output_layer.bias",   "score.bias",     REPLICATED))
DEEP_HEAD  = table(("output_layer.dense.weight", "score.0.weight", REPLICATED),
                   ("output_layer.dense.bias",   "score.0.bias",   REPLICATED),
                   ("output_layer.weight",       "score.2.weight", REPLICATED),
                   ("output_layer.bias",         "score.2.bias",   REPLICATED))
# fmt: on


def score_head(head: str) -> Rules:
    """The rules of a head that gives scores."""
    return DEEP_HEAD if head == "process_reward" else SCORE_HEAD


def check_head(head: object) -> None:
    """Raise ``ConfigError`` unless ``head`` is a known one."""
    if head not in KINDS:
        raise ConfigError(f"head must be one of {', '.join(KINDS)}, found {head!r}: pass one of them")


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


def expert_format_of(names: Iterable[str], rules: Rules) -> ExpertFormat | None:
    """The expert format of ``names``; None without routed experts, or if both formats have the same names."""
    split, whole = (
        {name.removesuffix("[*]") for rule in own if rule.axis == "etp" for name in rule.hf}
        for own in (rules, fused(rules))
    )
    patterns = set(map(pattern_of, names))
    return "fused" if patterns & (whole - split) else "split" if patterns & (split - whole) else None


def fused(rules: Rules) -> Rules:
    """The rules for files with the routed experts of a layer in one tensor: ``gate_up_proj`` and ``down_proj``.

    Their shape is [experts, out, in], as in transformers 5 and some published checkpoints, or [experts, in, out] if the
    rules are ``turned``. Rules that are already fused do not change.
    """
    return tuple(
        _fuse(rule) if rule.axis == "etp" and ".experts.*." in rule.hf[0] else rule
        for rule in with_joined_stacks(rules)
    )


def with_joined_stacks(rules: Rules) -> Rules:
    """The rules with one tensor for gate and up of all experts where files have two, as in memory and in ``peft``."""
    return tuple(_fuse(rule) if len(rule.hf) > 1 and rule.hf[0].endswith("[*]") else rule for rule in rules)


def _fuse(rule: Rule) -> Rule:
    before, experts, _ = rule.hf[0].partition(".experts.*.")
    module = f"{before}.experts" if experts else before.rpartition(".gate_proj")[0]
    name, _, kind = rule.mcore.removeprefix(f"{rule.mcore.partition('.experts.')[0]}.experts.*.").rpartition(".")
    first = "up_proj" if rule.hf[0].endswith(".up_proj.weight") else "gate_up_proj"  # a gate comes first
    whole = {"linear_fc1": first, "linear_fc2": "down_proj"}[name] + ("_bias" if kind == "bias" else "")
    layout = rule.layout if len(rule.hf) == 1 else Split(0, (1,) * len(rule.hf)) >> rule.layout
    return replace(rule, hf=(f"{module}.{whole}[*]",), layout=TRANSPOSED >> layout if rule.turned else layout)


def model_names(names: Collection[str], mapping: WeightMapping) -> dict[str, str]:
    """The new name of each tensor by its name in the source. Names that do not change are left out."""
    prefix = prefix_in(mapping)
    spare = filter(mapping.is_spare, names if mapping.spare else ())
    tied = {name: own for name in spare if (own := mapping.original(name)) not in names}
    if not prefix or all(
        name in names or name.removeprefix(prefix) not in names for name in embedding_names(mapping.rules)
    ):
        return tied
    new = {name: f"{prefix}{name}" for name in names if mapping.consumers(f"{prefix}{name}")}
    return tied | {name: own for name, own in new.items() if own not in names}


def prefix_in(mapping: WeightMapping) -> str:
    """The prefix that the names of a model without its head lack; empty if they lack none."""
    return next(filter(None, map(prefix_of, embedding_names(mapping.rules))), "")


def prefix_of(embedding: str) -> str:
    """The first word of an embedding's name, with its dot; empty if it has one word before its last."""
    return f"{embedding.partition('.')[0]}." if embedding.count(".") > 1 else ""


def stacks_of(mapping: WeightMapping) -> dict[str, bool]:
    """The names of stacks of experts that the rules transpose, each with whether it is the first of its layer."""
    return {
        rule.hf[0].removesuffix("[*]"): rule.mcore.endswith("linear_fc1.weight")
        for rule in mapping.rules
        if rule.axis == "etp" and upright(rule.layout) != rule.layout
    }


def transposed_in(tensors: Mapping[str, object], stacks: Mapping[str, bool]) -> list[str]:
    """The names of stacks [experts, out, in] among ``tensors``, for which the rules say [experts, in, out].

    The two stacks of a layer are compared, since one of them may be square. In [experts, out, in] the middle dim of
    gate and up is twice the last dim of down.

    Args:
        stacks: what ``stacks_of`` returned.
    """
    layers: dict[str, dict[bool, str]] = {}
    for name in tensors if stacks else ():
        if (is_first := stacks.get(pattern_of(name))) is not None:
            layers.setdefault(name.rpartition(".")[0], {})[is_first] = name
    pairs = [(layer[True], layer[False]) for layer in layers.values() if len(layer) == 2]
    return [name for pair in pairs if _is_transposed(*map(tensors.__getitem__, pair)) for name in pair]


def _is_transposed(first: object, second: object) -> bool:
    if not isinstance(first, Tensor) or not isinstance(second, Tensor) or not first.dim() == second.dim() == 3:
        return False
    return first.shape[1] == 2 * second.shape[2] and first.shape[2] == second.shape[1]
