"""Translates our rules to RLinf's form for its convertors: patterns of Megatron's names, a transform, HF's names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from mcore_bridge.architecture import architecture_of
from mcore_bridge.config.transformer import to_transformer_config
from mcore_bridge.errors import ConfigError
from mcore_bridge.rules.layout import COLUMN, GATED_UP, QKV, REPLICATED, ROW, VOCAB
from mcore_bridge.rules.mapping import Rule, Rules
from mcore_bridge.rules.names import fused_norm, fused_norms
from mcore_bridge.rules.variants import lm_head_of
from mcore_bridge.weights.provenance import HF, provenance_of

_LAYER = "decoder.layers.*."


class TransformType(Enum):
    """The transforms of RLinf's convertors, with the values of RLinf's ``TransformType``."""

    SPLIT_QKV = "split_qkv"
    SPLIT_FC1 = "split_fc1"
    SPLIT_EXPERT_FC1 = "split_expert_fc1"
    SPLIT_NONE = "split_none"


@dataclass(frozen=True)
class ConvertorRule:
    """One rule, with the fields of RLinf's class of this name.

    Attributes:
        pattern: matches whole Megatron names, with groups ``i`` (layer), ``ei`` (expert) and ``wb`` (weight or bias).
        transform: the name of the transform of the tensor.
        targets: HF names, as templates of ``re.Match.expand``.
        post: always None.
    """

    pattern: re.Pattern[str]
    transform: TransformType
    targets: list[str]
    post: None = None


def convertor_rules(hf: HF) -> list[ConvertorRule]:
    """The rules of a family, for ``build_rules`` of RLinf's ``BaseConvertor``. No two patterns match one name.

    >>> [ConvertorRule(r.pattern, TransformType(r.transform.value), r.targets) for r in convertor_rules(folder)]

    Raises:
        ConfigError: no architecture is registered for ``hf``, or RLinf has no transform for one of its layouts.
    """
    provenance = provenance_of(hf)
    config = to_transformer_config(provenance.hf, architecture_of(provenance.hf).fields)
    if getattr(config, "per_layer_config", None):
        raise ConfigError(
            f"the layers of a model must have one size here, and those of this {provenance.hf.model_type} differ: "
            "RLinf splits queries, keys and values by one number of heads. Use iter_hf_weights"
        )
    rules = tuple(dict.fromkeys((*provenance.rules, *lm_head_of(provenance.rules, provenance.spelling))))
    by_pattern: dict[str, ConvertorRule] = {}
    for rule in rules:
        if not rule.copy and not rule.mcore.startswith("mtp."):
            for mcore in _spellings(rule, rules):
                theirs = _convertor_rule(rule, mcore)
                by_pattern.setdefault(theirs.pattern.pattern, theirs)
    return list(by_pattern.values())


def _spellings(rule: Rule, rules: Rules) -> Iterator[str]:
    """Yield the names that the parameter of a rule may have in a model with TransformerEngine's modules."""
    modules = {other.mcore.removeprefix(_LAYER).rpartition(".")[0] for other in rules}
    name = rule.mcore.removeprefix(_LAYER)
    fused = fused_norm(name, fused_norms(modules))
    if fused is not None:
        yield f"{_LAYER}{fused}"
    if fused is None or (name.startswith("pre_mlp_layernorm.") and "mlp.experts.*.linear_fc1" in modules):
        yield rule.mcore


def _convertor_rule(rule: Rule, mcore: str) -> ConvertorRule:
    module, _, kind = mcore.rpartition(".")
    is_linear = ".linear_" in mcore and kind in ("weight", "bias")
    names = [_template(name, is_linear) for name in rule.hf]
    pattern = re.escape(mcore if not is_linear else f"{module}.")
    pattern = pattern.replace(r"\.experts\.\*\.", r"\.experts\.local_experts\.(?P<ei>\d+)\.")
    pattern = pattern.replace(r"\.\*\.", r"\.(?P<i>\d+)\.")
    ending = "(?P<wb>weight|bias)" if is_linear else ""
    return ConvertorRule(re.compile(f"{pattern}{ending}$"), _transform(rule), names)


def _template(hf: str, is_linear: bool) -> str:
    hf = hf.replace(".*.", r".\g<i>.", 1).replace(".*.", r".\g<ei>.", 1)
    return hf.rpartition(".")[0] + r".\g<wb>" if is_linear else hf


def _transform(rule: Rule) -> TransformType:
    if rule.layout == QKV:
        return TransformType.SPLIT_QKV
    if rule.layout == GATED_UP:
        return TransformType.SPLIT_EXPERT_FC1 if rule.axis == "etp" else TransformType.SPLIT_FC1
    if rule.layout in (COLUMN, ROW, VOCAB, REPLICATED):
        return TransformType.SPLIT_NONE
    raise ConfigError(
        f"expected layouts for which RLinf has a transform, found {rule.layout} of {rule.mcore}: use our resharder, "
        "which supports any layout"
    )
