"""Rules of low-rank adapters, made from the rules of the weights that they adapt.

A layout moves whole slices along one dim of ``[out, in]``. So it commutes with the product ``B A``: a layout of rows
moves rows of B, and a layout of columns moves columns of A. If HF holds a weight as ``[in, out]``, the factors belong
to its transpose. So the rule of a linear layer gives two more rules, with the names of ``peft``: each HF projection has
its own ``lora_A`` and ``lora_B``. The magnitudes of DoRA, one for each row, have the layout of B. If a layer of mcore
joins projections, some of them may have no adapter. Their rows of B are zero and stay zero. If a layer of mcore
*shares* one A among its projections, ``peft`` stores this A under the name of each.

>>> from mcore_bridge.rules.layout import GATED_UP
>>> from mcore_bridge.rules.mapping import table
>>> base = table(("mlp.linear_fc1.weight", "mlp.{gate,up}_proj.weight", GATED_UP))
>>> [rule.mcore for rule in adapter_rules(base, ["gate_proj", "up_proj"])]
['mlp.linear_fc1.adapter.linear_in.weight', 'mlp.linear_fc1.adapter.linear_out.weight']
>>> adapter_rules(base, ["linear_fc1"])[1].hf
('mlp.gate_proj.lora_B.weight', 'mlp.up_proj.lora_B.weight')
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Literal

import torch
from torch import Tensor

from mcore_bridge.errors import ConfigError
from mcore_bridge.rules.layout import REPLICATED, Chain, Concat, Fill, Leading, upright
from mcore_bridge.rules.mapping import Rule, Rules, WeightMapping
from mcore_bridge.rules.names import TOWER
from mcore_bridge.rules.trace import Trace, moved_dim
from mcore_bridge.rules.variants import HEAD, with_joined_stacks

LINEAR = frozenset(
    {
        *("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj"),
        *("linear_gate", "linear_qk", "linear_kv"),
        *("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"),
    }
)
"""The modules of megatron-core whose weight is ``[out, in]`` and multiplies the hidden state of a decoder layer."""
_OF_KERNELS = (".mixer.out_proj.weight", ".mamba.out_proj.weight")
FACTORS = {"linear_in": "lora_A.weight", "linear_out": "lora_B.weight"}
"""The modules of an adapter in mcore (Megatron-Bridge's names), and the names of their weights in ``peft``."""
MAGNITUDE = {"magnitude": "lora_magnitude_vector"}
"""The module that an adapter of DoRA has in addition, and the name of its weight in ``peft``."""
ENDS = tuple(f".{name}" for name in (*FACTORS.values(), *MAGNITUDE.values()))
"""The ends of all names of tensors in ``peft``."""
ALL_LINEAR = "all-linear"
"""The targets of ``peft`` that stand for all linear layers but the head."""
_QV = ("q_proj", "v_proj")
DEFAULT_TARGETS = {
    **dict.fromkeys(("llama", "llama4", "mistral", "mixtral", "stablelm", "gemma", "gemma2", "gemma3_text"), _QV),
    **dict.fromkeys(("qwen2", "qwen3"), _QV),
    "gpt_neox": ("query_key_value",),
    "nemotron_h": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "phi": (*_QV, "fc1", "fc2"),
}
"""The targets that ``peft`` 0.21.2 chooses for a model type if a config has none."""

Sharing = Literal["own", "shared"]
"""Whether each HF projection has a separate A, or a layer of mcore has one A for all of its projections."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a model: rank and scale (``alpha / rank``), equal for all, and the rules of their tensors.

    Attributes:
        rank: the rank of all adapters, also if a folder has several.
        alpha: the scale of all adapters times ``rank``.
        mapping: the rules of their tensors.
        names: the canonical names of the tensors in all chunks of this rank.
        kind: whether the projections of a layer share one A.
        dropout: the probability with which a step in training mode zeroes an element of the input of A.
        dora: whether each row of an adapted weight has a trained magnitude.

    Example:
        >>> adapters.rank, adapters.alpha, adapters.kind
        (16, 32, 'own')
    """

    rank: int
    alpha: float
    mapping: WeightMapping
    names: frozenset[str]
    kind: Sharing
    dropout: float = 0.0
    dora: bool = False

    def further_names(self, name: str) -> tuple[str, ...]:
        """The names under which ``peft`` repeats a shared A, by the HF name of the first projection that shares it."""
        first, second = FACTORS
        end = f".{FACTORS[first]}"
        if self.kind == "own" or not name.endswith(end):
            return ()
        bindings = (self.mapping.bind(mcore.replace(first, second)) for mcore in self.mapping.consumers(name))
        return tuple(f"{base_name(other)}{end}" for binding in bindings for other in binding.hf[1:])


def modules_of_adapter(dora: bool) -> dict[str, str]:
    """The modules of an adapter, each with the end of its HF name."""
    return FACTORS | MAGNITUDE if dora else FACTORS


def all_linear(rules: Rules) -> tuple[str, ...]:
    """The HF names of all linear layers that can have an adapter. Experts in one tensor are parameters, and no layers.

    >>> from mcore_bridge.rules.layout import QKV
    >>> from mcore_bridge.rules.mapping import table
    >>> all_linear(table(("linear_qkv.weight", "{q,k,v}_proj.weight", QKV)))
    ('q_proj', 'k_proj', 'v_proj')
    """
    able = (rule for rule in _adaptable(rules) if _module(rule.mcore) and not _obstacle(rule))
    return tuple(dict.fromkeys(_module(name) for rule in able for name in rule.hf if name.endswith(".weight")))


def adapter_rules(rules: Rules, targets: Sequence[str], kind: Sharing = "own", *, dora: bool = False) -> Rules:
    """The rules of the adapters of all linear layers that ``targets`` name.

    Args:
        rules: the rules of the model's weights.
        targets: ends of module names, each of one or more words: in HF ("q_proj", "mlp.down_proj",
            "experts.gate_up_proj") or in mcore ("linear_qkv"). An end in mcore means layers of the decoder alone.
        kind: with "shared", P below is 1 for each A.
        dora: whether there are magnitudes, too.

    Returns:
        Two rules for each targeted weight. With P named HF projections, ``linear_in`` is ``[P * rank, in]`` and
        ``linear_out`` is ``[out, rank]``, where each row of ``linear_out`` belongs to its own projection. Rows of
        projections that are not named have no HF tensor. With ``dora``, a third rule is for ``magnitude``, ``[out]``.

    Raises:
        ConfigError: naming all targets that match nothing, and all that cannot have an adapter.
    """
    rules = with_joined_stacks(rules)
    weights = _adaptable(rules)
    problems = [*_unmatched(weights, rules, targets)]
    of_decoder = [rule.mcore for rule in weights if not rule.mcore.startswith(TOWER)]
    in_hf = [target for target in targets if not any(_is_named(name, [target]) for name in of_decoder)]
    chosen = []
    for rule in weights:
        in_tower = rule.mcore.startswith(TOWER)
        whole = not in_tower and _is_named(rule.mcore, targets)
        own = in_hf if in_tower else targets
        named = tuple(part for part, name in enumerate(rule.hf) if whole or _is_named(name, own))
        if not named or not _module(rule.mcore):  # a bias goes with its weight
            continue
        if reason := _obstacle(rule) or (dora and _obstacle_to_dora(rule)):
            problems.append(f"{rule.hf[named[0]]} cannot have an adapter: {reason}")
        else:
            chosen.append((rule, named))
    if problems:
        raise ConfigError(f"targets must name linear layers, found {list(targets)}: " + "; ".join(problems))
    return tuple(made for rule, named in chosen for made in _adapted(rule, named, kind, dora))


def base_name(hf: str) -> str:
    """The HF name of the weight that a tensor of an adapter belongs to, without ``.weight``; of others, the own name.

    >>> base_name("model.layers.0.mlp.up_proj.lora_B.weight")
    'model.layers.0.mlp.up_proj'
    """
    name = hf.removesuffix("[*]")
    return next((name.removesuffix(end) for end in ENDS if name.endswith(end)), name)


def factor_name(module: str, end: str) -> str:
    """The canonical name of a tensor of the adapter of ``module``, where ``end`` is of ``modules_of_adapter``."""
    return f"{module}.adapter.{end}.weight"


def is_adapter(mcore: str) -> bool:
    """Whether a canonical name belongs to a tensor of an adapter."""
    return any(f".adapter.{end}." in mcore for end in (*FACTORS, *MAGNITUDE))


def rows_of_parts(traced: Trace, shard: int) -> Tensor:
    """For each row of a shard of ``linear_out``, the number of the HF projection that it came from. int64 [rows].

    It is -1 for rows of a projection without an adapter.
    """
    parts = torch.full(traced.shard_shape[:1], -1)
    for copy in traced.to_mcore:
        if copy.shard == shard and copy.dim == 0:
            copy.of_shard(parts).fill_(copy.part)
    return parts


def _adaptable(rules: Rules) -> list[Rule]:
    """The rules of the decoder without its indexers, which get no gradient, and of the linear layers of a tower."""
    outside = (rule for rule in rules if not rule.mcore.startswith("mtp.") and ".indexer." not in rule.mcore)
    inside = (rule for rule in outside if not rule.copy)
    return [rule for rule in inside if rule.is_linear or not rule.mcore.startswith(TOWER)]


def _adapted(rule: Rule, named: tuple[int, ...], kind: Sharing, dora: bool) -> Iterator[Rule]:
    """The rules of A and B, and of magnitudes, for the parts of ``rule`` that are named."""
    having_own = named[:1] if kind == "shared" else named
    layout = upright(rule.layout)
    first, second = Concat(0, (1,) * len(having_own)) >> REPLICATED, layout
    if moved_dim(layout) == 1:
        first, second = layout, REPLICATED
    elif len(named) < len(rule.hf):
        second = Fill(_ratio(rule), named) >> layout
    ends = modules_of_adapter(dora).items()
    for (end, hf), moves, parts in zip(ends, (first, second, second), (having_own, named, named), strict=False):
        names = tuple(_adapter_name(rule.hf[part], hf) for part in parts)
        yield replace(rule, mcore=factor_name(_module(rule.mcore), end), hf=names, layout=moves)


def _ratio(rule: Rule) -> tuple[tuple[int | str, ...], ...]:
    """The relative numbers of rows of the parts that a layout joins: the ratio of its first ``Concat``.

    Parts that a layout splits before, such as queries with their gates, count together.
    """
    assert isinstance(rule.layout, Chain)
    joined = next(step for step in rule.layout.steps if isinstance(step, Concat))
    split = next((step for step in rule.layout.steps if isinstance(step, Leading)), None)
    first = split.becomes if split else 1
    return (joined.ratio[:first], *((share,) for share in joined.ratio[first:]))


def _adapter_name(hf: str, factor: str) -> str:
    whole, entry = hf.removesuffix("[*]"), "[*]" if hf.endswith("[*]") else ""
    return f"{whole.removesuffix('.weight')}.{factor}{entry}"


def _obstacle(rule: Rule) -> str:
    module = _module(rule.mcore)
    if rule.hf[0].endswith(_OF_KERNELS):
        return "transformers' kernels for Mamba-2 read its weight alone, so peft refuses it"
    if not rule.is_linear and module.rpartition(".")[2] not in LINEAR:
        return f"{module} is no linear layer inside a decoder layer"
    return ""


def _obstacle_to_dora(rule: Rule) -> str:
    is_expert = ".experts." in rule.mcore
    return "DoRA of routed experts is not supported, nor by peft if they are in one tensor" if is_expert else ""


def _unmatched(weights: Collection[Rule], rules: Rules, targets: Sequence[str]) -> Iterator[str]:
    names = [name for rule in weights for name in (rule.mcore, *rule.hf)]
    modules = sorted({word for name in names if (word := _module(name).rpartition(".")[2])})
    linear = [rule for rule in weights if _module(rule.mcore) and not _obstacle(rule)]
    able = sorted({_module(name).rpartition(".")[2] for rule in linear for name in (rule.mcore, *rule.hf)})
    tied = next((rule.hf[0] for rule in rules if rule.mcore == "output_layer.weight" and not rule.exported), "")
    for target in targets:
        if any(_is_named(name, [target]) for name in names):
            continue
        if tied and _is_named(HEAD, [target]):
            yield f"{target!r} is the word embedding {tied}, as the head is tied to it, and no linear layer"
            continue
        if any(_is_named(name, [target]) for rule in rules for name in (rule.mcore, *rule.hf)):
            yield (
                f"{target!r} is a layer of MTP, or no linear layer of a model of images, or within an indexer of keys: "
                "these get no adapters"
            )
        else:
            near = get_close_matches(target, modules, n=3)
            yield f"{target!r} matches no module, " + (f"the nearest are {near}" if near else f"there are {able}")


def _module(name: str) -> str:
    """The module of a weight, without an index ``[...]``; empty if ``name`` is not the name of a weight."""
    whole = name.removesuffix("[*]")
    return whole.removesuffix(".weight") if whole.endswith(".weight") or whole != name else ""


def _is_named(name: str, targets: Sequence[str]) -> bool:
    module = f".{_module(name)}"
    return len(module) > 1 and any(module.endswith(f".{target}") for target in targets)
