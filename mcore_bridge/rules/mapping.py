"""Rules pair canonical mcore names with HF names through a layout, and a mapping is a total set of rules.

In a name, ``*`` stands for a layer or expert number. An HF name that ends in ``[*]`` means one entry, along dim 0, of a
tensor that holds all experts.

Total means: every mcore parameter has exactly one rule, and every HF name has a rule or is ignored. Any other name
raises.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import product
from typing import Literal

from mcore_bridge.errors import MappingError
from mcore_bridge.rules.layout import Axes, Layout
from mcore_bridge.rules.names import EMBEDDING, TOWER, layer_of, mtp_layer_of

_TOWER_LAYERS = 128
_NUMBER = re.compile(r"(?<=\.)[0-9]{1,9}(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Rule:
    """Pairs a canonical mcore name with HF names through a layout. Names are patterns.

    Attributes:
        mcore: the canonical name.
        hf: the HF names, in the order of the layout's parts.
        layout: from the HF tensors to the shards.
        offset: added to the first number of the mcore name to get the number in the HF names. HF numbers MTP layers
            after the layers of the decoder.
        stride: HF layer = mcore layer * stride + offset. It is 2 if HF counts attention and MLP of an MTP layer as two
            layers, else 1.
        exported: False if another parameter already yields the HF tensor, as with a tied output layer.
        axis: the mesh axis that the layout calls ``tp``; ``etp`` for routed experts.
        copy: the HF names are second names of a tensor of another rule. A source must have equal values under both
            names. With ``exported`` a save writes the copies. Without, a source may have the tensor under this name
            only.
        count: the first number of the mcore name is below it. None: there is no limit.
        layers: the first number of the mcore name is one of these. None: it may be any.
        turned: for a routed expert: a tensor of all experts holds it transposed.
        is_linear: for a tensor of a tower: it is the weight of a linear layer.
    """

    mcore: str
    hf: tuple[str, ...]
    layout: Layout
    offset: int = 0
    stride: int = 1
    exported: bool = True
    axis: str = "tp"
    copy: bool = False
    count: int | None = None
    layers: frozenset[int] | None = None
    turned: bool = False
    is_linear: bool = False


@dataclass(frozen=True, slots=True)
class Binding:
    """A rule applied to one canonical name. A save writes its tensors again under their second names."""

    mcore: str
    """The canonical name."""
    hf: tuple[str, ...]
    """The HF names, in the order of the layout's parts."""
    layout: Layout
    """From the HF tensors to the shards."""
    exported: bool
    """False if another parameter already yields the HF tensor."""
    axis: str
    """The mesh axis that the layout calls ``tp``."""
    copies: tuple[str, ...]
    """The second HF names."""


Rules = tuple[Rule, ...]
Prefixes = tuple[tuple[str, str], ...]
"""Prefixes of HF names in a checkpoint of text alone, each with the prefix in a composite."""
ExpertFormat = Literal["split", "fused"]
"""How HF holds the routed experts of a layer: one tensor per expert, or one tensor for all of them."""


def table(*rows: tuple[str, str, Layout], exported: bool = True) -> Rules:
    """Rules from rows ``(mcore name, HF names, layout)``, where ``{q,k,v}`` in the HF names lists the parts."""
    return tuple(Rule(mcore, _parts(hf), layout, exported=exported) for mcore, hf, layout in rows)


def under(mcore: str, hf: str, *rules: Rules) -> Rules:
    """The rules of a module, placed at ``mcore`` on one side and at ``hf`` on the other."""
    return tuple(
        replace(rule, mcore=f"{mcore}.{rule.mcore}", hf=tuple(f"{hf}.{name}" for name in rule.hf))
        for group in rules
        for rule in group
    )


def respelled(rules: Rules, spelling: Prefixes) -> Rules:
    """The rules of a text model under the names that a composite gives its tensors."""
    return tuple(replace(rule, hf=tuple(respelled_name(name, spelling) for name in rule.hf)) for rule in rules)


def embedding_rules(rules: Rules) -> Rules:
    """The rules of the embedding, without the rules of its copies."""
    return tuple(rule for rule in rules if rule.mcore == EMBEDDING and not rule.copy)


def embedding_names(rules: Rules) -> tuple[str, ...]:
    """The HF names of the embedding, without its copies."""
    return tuple(name for rule in embedding_rules(rules) for name in rule.hf)


def top_names(rules: Rules) -> tuple[str, ...]:
    """The first words of all HF names, each with its dot: the prefixes of this model's names."""
    return tuple(sorted({f"{name.partition('.')[0]}." for rule in rules for name in rule.hf}))


def respelled_name(name: str, spelling: Prefixes) -> str:
    """A name, or a pattern of names, with its prefix replaced, if it has one of these prefixes."""
    for old, new in spelling:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def respelled_module(name: str, spelling: Prefixes) -> str:
    """Like ``respelled_name``, for a module, and prefixes in which ``*`` is a number, or ``*`` of a pattern.

    >>> respelled_module("tower.layers.3.fc1", (("tower.layers.*.fc1.", "tower.blocks.*.fc0."),))
    'tower.blocks.3.fc0'
    """
    whole = f"{name}."
    for old, new in spelling:
        if match := re.match(re.escape(old).replace(r"\*", r"(\d+|\*)"), whole):
            return f"{_fill(new, [*match.groups()])}{whole[match.end() :]}"[:-1]
    return name


def numbered(rules: Rules, *, offset: int = 0, stride: int = 1, count: int | None = None) -> Rules:
    """The rules for ``count`` modules, whose first number in HF names begins at ``offset`` and grows by ``stride``."""
    return tuple(replace(rule, offset=offset, stride=stride, count=count) for rule in rules)


def of_layers(rules: Rules, layers: Iterable[int]) -> Rules:
    """The rules for these numbers of layers alone: modules that only some layers have in place of others."""
    return tuple(replace(rule, layers=frozenset(layers)) for rule in rules)


def second_names(rules: Rules) -> Rules:
    """The HF names of ``rules`` as second names of their tensors: loads accept them, and saves do not write them."""
    return tuple(replace(rule, copy=True, exported=False) for rule in rules)


def experts(mcore: str, hf: str, *rules: Rules, turned: bool = False) -> Rules:
    """Like ``under``, for the rules of a routed expert: expert tensor parallelism (``etp``) cuts it."""
    return tuple(replace(rule, axis="etp", turned=turned) for rule in under(mcore, hf, *rules))


@lru_cache(maxsize=1 << 16)
def pattern_of(name: str) -> str:
    """``name`` with ``*`` for each of its numbers. Cached: a load calls this several times for every name."""
    return _NUMBER.sub("*", name)


def unstacked(name: str) -> tuple[str, int | None]:
    """An HF name without its ``[number]``, and this number, or None."""
    if not name.endswith("]"):  # the usual case; this runs for every name of a model
        return name, None
    whole, _, number = name[:-1].rpartition("[")
    return whole, int(number)


def _parts(pattern: str) -> tuple[str, ...]:
    before, brace, rest = pattern.partition("{")
    inside, _, after = rest.partition("}")
    return tuple(f"{before}{part}{after}" for part in inside.split(",")) if brace else (pattern,)


@dataclass(frozen=True)
class WeightMapping:
    """All rules of a model, and two lists of HF names, as ``fnmatch`` patterns.

    Attributes:
        rules: the rules of all parameters.
        ignored: HF names that a source may hold and no parameter uses.
        optional: HF names that a source may lack.
    """

    rules: Rules
    ignored: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    """Prefixes of the tensors of text, if the model is a composite. All other tensors are not built, so no parameter
    uses them.
    """
    not_built: tuple[str, ...] = ()
    """Prefixes in ``text`` that are not built either."""
    num_mtp_layers: int = 0
    """How many MTP layers the model has. A checkpoint may have more MTP layers, which are not built."""
    mtp: tuple[str, ...] = ()
    """HF names, as ``fnmatch`` patterns, of tensors in MTP layers that are not built and have no rule."""
    repeated: tuple[tuple[str, str], ...] = ()
    """HF names of copies of the embedding or the head in MTP layers that are not built, each with its parameter."""
    copies_mtp: bool = True
    """Whether a save copies the MTP layers that are not built."""
    _by_mcore: dict[str, Rule] = field(init=False, repr=False, compare=False)
    _by_hf: dict[str, list[Rule]] = field(init=False, repr=False, compare=False)
    _copies: dict[str, tuple[str, ...]] = field(init=False, repr=False, compare=False)
    twins: Mapping[str, str] = field(init=False, repr=False, compare=False)
    """Second HF names of tensors, each with the name under which the tensor is read."""
    spare: Mapping[str, str] = field(init=False, repr=False, compare=False)
    """The ``twins`` that are never written. A source may have the tensor only under such a name."""

    def __post_init__(self) -> None:
        by_mcore: dict[str, Rule] = {}
        by_hf: dict[str, list[Rule]] = {}
        copies: dict[str, tuple[str, ...]] = {}
        for rule in self.rules:
            if rule.copy:
                if rule.exported:
                    copies[rule.mcore] = (*copies.get(rule.mcore, ()), *rule.hf)
                continue
            if rule.mcore in by_mcore:
                raise MappingError(
                    f"{rule.mcore} must have one rule, found two: {by_mcore[rule.mcore].hf} and {rule.hf}; keep one"
                )
            if any(name.count("*") != rule.mcore.count("*") for name in rule.hf):
                raise MappingError(
                    f"{rule.mcore} must have as many numbers ('*') as its HF names {rule.hf}; fix the rule"
                )
            by_mcore[rule.mcore] = rule
            for name in rule.hf:
                by_hf.setdefault(name.removesuffix("[*]"), []).append(rule)
        object.__setattr__(self, "_by_mcore", by_mcore)
        object.__setattr__(self, "_by_hf", by_hf)
        object.__setattr__(self, "_copies", copies)
        further = [(rule, dict(_second_and_first(rule, by_mcore[rule.mcore]))) for rule in self.rules if rule.copy]
        object.__setattr__(self, "twins", {second: own for _, names in further for second, own in names.items()})
        spare = {second: own for rule, names in further if not rule.exported for second, own in names.items()}
        object.__setattr__(self, "spare", spare)

    def bind(self, mcore: str) -> Binding:
        """The binding of a canonical name.

        Raises:
            MappingError: no rule matches the name.
        """
        rule = self.rule_of(mcore)
        numbers = _NUMBER.findall(mcore) if "*" in rule.mcore else []
        if numbers:
            numbers[0] = str(int(numbers[0]) * rule.stride + rule.offset)
        names = tuple(_fill(name, numbers) for name in rule.hf)
        return Binding(mcore, names, rule.layout, rule.exported, rule.axis, self._copies.get(mcore, ()))

    def rule_of(self, mcore: str) -> Rule:
        """The rule of a canonical name.

        Raises:
            MappingError: no rule matches the name.
        """
        pattern = pattern_of(mcore)
        rule = self._by_mcore.get(mcore) or self._by_mcore.get(pattern)
        if rule is None:
            near = get_close_matches(pattern, self._by_mcore, n=3)
            raise MappingError(
                f"no rule for the mcore parameter {mcore}; the nearest rules are {near}. Add a rule for it to the "
                "architecture, or build the model without it"
            )
        return rule

    def consumers(self, hf: str) -> tuple[str, ...]:
        """The canonical names of all parameters that use an HF tensor, whether or not a model has them.

        For a tensor that holds all experts, it is the name of the first expert.
        """
        numbers = _NUMBER.findall(hf)
        first = int(numbers[0]) if numbers else 0
        return tuple(
            _fill(rule.mcore, [str((first - rule.offset) // rule.stride), *numbers[1:], "0"][: rule.mcore.count("*")])
            for rule in self._by_hf.get(pattern_of(hf), ()) or self._by_hf.get(hf, ())
            if _has_number(rule, numbers)
        )

    def pattern(self, hf: str) -> str:
        """An HF name with ``*`` for each number, unless a rule has the name with its numbers."""
        return hf if hf in self._by_hf else pattern_of(hf)

    def original(self, hf: str) -> str:
        """The name under which the rules read a tensor with this name. It differs for second names alone."""
        own = self.twins.get(hf) or self.twins.get(pattern_of(hf))
        return hf if own is None else _fill(own, _NUMBER.findall(hf)[: own.count("*")])

    def is_spare(self, hf: str) -> bool:
        """Whether a source may have a tensor under this second name only."""
        return hf in self.spare or pattern_of(hf) in self.spare

    def names(self, num_layers: int, num_experts: int) -> Iterator[str]:
        """Yield the HF names of all rules for these numbers of layers and experts. A model may lack some of them.

        The layers of a tower are numbered up to ``_TOWER_LAYERS``, since no rule has their number.
        """
        for rule in self.rules:
            layers = _TOWER_LAYERS if rule.mcore.startswith(TOWER) else num_layers
            counts = (rule.count or layers, max(num_experts, 1), *(1 for _ in range(rule.mcore.count("*"))))
            for first, *others in product(*map(range, counts[: max(rule.mcore.count("*"), 1)])):
                if rule.layers is not None and first not in rule.layers:
                    continue
                numbers = [str(first * rule.stride + rule.offset), *map(str, others)]
                for name in rule.hf:
                    whole = name.removesuffix("[*]")
                    yield _fill(whole, numbers[: whole.count("*")])

    def is_unused(self, hf: str) -> bool:
        """Whether no parameter of the model uses this HF tensor: it is ignored, or of a part that is not built."""
        return (
            (matches(hf, self.ignored) and not self.consumers(hf))
            or self.original(hf) != hf
            or self._is_of_other_part(hf)
            or self.is_unbuilt_mtp(hf)
        )

    def is_not_built(self, hf: str) -> bool:
        """Whether this HF tensor belongs to a part that is not built, so that a save copies its bytes.

        Such parts are MTP layers, and parts of a composite beside its text.
        """
        return self._is_of_other_part(hf) or (self.copies_mtp and self.is_unbuilt_mtp(hf))

    def is_unbuilt_mtp(self, hf: str) -> bool:
        """Whether this HF tensor is of an MTP layer that is not built."""
        if any(rule.mcore.startswith("mtp.") for rule in self._by_hf.get(pattern_of(hf), ())):
            layers = [layer for layer in map(mtp_layer_of, self.consumers(hf)) if layer is not None]
            if layers:
                return any(layer >= self.num_mtp_layers for layer in layers)
        return matches(hf, self.mtp)

    def _is_of_other_part(self, hf: str) -> bool:
        return bool(self.text) and (not hf.startswith(self.text) or hf.startswith(self.not_built))

    def repeated_by(self, hf: str) -> str | None:
        """The HF name of the tensor that a tensor of an MTP layer that is not built repeats, if it does."""
        rules = (self._by_mcore.get(mcore) for name, mcore in self.repeated if name == hf)
        return next((rule.hf[0] for rule in rules if rule is not None), None)

    def is_copy(self, hf: str) -> bool:
        """Whether an HF name is a second name of a tensor, under which a save writes it again."""
        return any(hf in names for names in self._copies.values())

    def is_optional(self, hf: str) -> bool:
        """Whether a source may lack this HF tensor; the parameter then keeps its initial values."""
        return matches(hf, self.optional)


@dataclass(frozen=True, eq=True)
class ModelAxes(Mapping[str, int]):
    """The sizes that the layouts of a model need: those of the model, by name, and those of layers that differ.

    >>> axes = ModelAxes({"tp": 2, "groups": 4}, {1: {"groups": 8}})
    >>> axes["groups"], axes.of("decoder.layers.1.self_attention.linear_qkv.weight", "tp")["groups"]
    (4, 8)
    """

    model: Axes
    layers: Mapping[int, Axes] = field(default_factory=dict)

    def __getitem__(self, name: str) -> int:
        return self.model[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.model)

    def __len__(self) -> int:
        return len(self.model)

    def __or__(self, sizes: Axes) -> ModelAxes:
        """These axes with other sizes of the model."""
        return replace(self, model={**self.model, **sizes})

    def of(self, mcore: str, axis: str) -> Axes:
        """The axes for the layout of a canonical name. ``tp`` is the size of the mesh axis that cuts its parameter."""
        layer = layer_of(mcore)
        own = {} if layer is None else self.layers.get(layer, {})
        return {**self.model, **own, "tp": self.model[axis]}


def axes_of(binding: Binding, axes: ModelAxes) -> Axes:
    """The ``axes`` for the layout of ``binding``."""
    return axes.of(binding.mcore, binding.axis)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether ``name`` matches one of the ``fnmatch`` patterns; upper and lower case differ."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _has_number(rule: Rule, numbers: list[str]) -> bool:
    """Whether ``rule`` applies to the first of ``numbers``, which HF counts."""
    number, rest = divmod(int(numbers[0]) - rule.offset if numbers else 0, rule.stride)
    is_there = rule.layers is None or number in rule.layers
    return number >= 0 and rest == 0 and is_there and (rule.count is None or number < rule.count)


def _second_and_first(rule: Rule, own: Rule) -> Iterator[tuple[str, str]]:
    """The second HF names of ``rule``, each with the name of its own rule. Names of some layers alone have numbers."""
    for second, first in zip(rule.hf, own.hf, strict=True):
        if second == first:  # only another part of the tensor has a second name
            continue
        if rule.layers is None:
            yield second, first
        else:
            yield from ((_fill(second, [str(layer)]), _fill(first, [str(layer)])) for layer in rule.layers)


def _fill(pattern: str, numbers: list[str]) -> str:
    head, *tails = pattern.split("*")
    return head + "".join(number + tail for number, tail in zip(numbers, tails, strict=True))
