"""The entries of config tables. Each claims HF fields and translates them in both directions; a table is total.

Every key of an HF config is claimed by exactly one entry. A key without an entry raises: if it were dropped silently,
the model might load well and compute something else. On the mcore side, ``TransformerConfig`` fields, ``GPTModel``
arguments and our own attributes form one flat mapping. So an entry need not name the kind of its value.

Sizes are checked as soon as a config is read, because torch's own errors about sizes name no field.
"""

import dataclasses
import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeGuard

from mcore_bridge.arguments import is_count
from mcore_bridge.errors import ConfigError, shown

Hf = Mapping[str, object]
"""An HF config as ``to_dict()`` gives it."""
Mcore = Mapping[str, object]
"""``TransformerConfig`` fields, ``GPTModel`` arguments and config attributes, by name."""

_REQUIRED = object()


class Field(Protocol):
    """One entry of a config table."""

    @property
    def names(self) -> tuple[str, ...]:
        """The HF fields that the entry claims."""

    def to_mcore(self, hf: Hf) -> dict[str, object]: ...

    def to_hf(self, mcore: Mcore) -> dict[str, object]: ...


@dataclass(frozen=True, slots=True)
class Map:
    """The HF field and the mcore name hold one value. Without a default, the HF field must be there.

    ``aka`` are other names of the HF field; a config has one of them.
    """

    hf: str
    mcore: str
    default: object = _REQUIRED
    aka: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.hf, *self.aka)

    def to_mcore(self, hf: Hf) -> dict[str, object]:
        value = next((hf[name] for name in self.names if name in hf), self.default)
        if value is _REQUIRED or value is None:
            raise ConfigError(
                f"{self.hf} must be set, because megatron-core's {self.mcore} follows it; found None. Set it in the HF "
                "config."
            )
        expected, is_one = _KINDS.get(_kind(self.mcore), _ANY)
        if not is_one(value):
            raise ConfigError(
                f"{self.hf} must be {expected}, as megatron-core's {self.mcore} is, found {shown(value)}. Correct "
                "the HF config."
            )
        return {self.mcore: value}

    def to_hf(self, mcore: Mcore) -> dict[str, object]:
        return {self.hf: mcore[self.mcore]}


@dataclass(frozen=True, slots=True)
class Require:
    """The HF field is absent or has an allowed value, for which our mapping is exact; any other raises ``reason``."""

    hf: str
    allowed: tuple[object, ...]
    reason: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.hf,)

    def to_mcore(self, hf: Hf) -> dict[str, object]:
        value = hf.get(self.hf, self.allowed[0])
        if not any(value == allowed and type(value) is type(allowed) for allowed in self.allowed):
            expected = " or ".join(map(repr, self.allowed))
            raise ConfigError(f"{self.hf} must be {expected}, found {shown(value)}: {self.reason}.")
        return {}

    def to_hf(self, mcore: Mcore) -> dict[str, object]:
        return {}


@dataclass(frozen=True, slots=True)
class Const:
    """The architecture fixes the mcore value, and HF has no field for it. ``to_hf`` raises if the value was changed."""

    mcore: str
    value: object

    @property
    def names(self) -> tuple[str, ...]:
        return ()

    def to_mcore(self, hf: Hf) -> dict[str, object]:
        return {self.mcore: self.value}

    def to_hf(self, mcore: Mcore) -> dict[str, object]:
        if mcore[self.mcore] != self.value:
            raise ConfigError(
                f"{self.mcore} must be {self.value!r} to be written as an HF config of this architecture, "
                f"found {mcore[self.mcore]!r}. Remove the override."
            )
        return {}


@dataclass(frozen=True, slots=True)
class Preset(Const):
    """A value that we set because mcore's default differs from HF. It may be overridden: no HF field depends on it."""

    def to_hf(self, mcore: Mcore) -> dict[str, object]:
        return {}


@dataclass(frozen=True, slots=True)
class Ignore:
    """HF fields that do not change the model that we build, with the reason."""

    reason: str
    names: tuple[str, ...]

    def to_mcore(self, hf: Hf) -> dict[str, object]:
        return {}

    def to_hf(self, mcore: Mcore) -> dict[str, object]:
        return {}


@dataclass(frozen=True, slots=True)
class Derive:
    """Translates several fields at once, by two functions that are inverses of each other.

    ``refuses`` is for the documentation. It lists the values that HF allows and ``forward`` raises for, as "what: why".
    """

    names: tuple[str, ...]
    forward: Callable[[Hf], dict[str, object]]
    backward: Callable[[Mcore], dict[str, object]]
    refuses: tuple[str, ...] = ()

    def to_mcore(self, hf: Hf) -> dict[str, object]:
        return self.forward(hf)

    def to_hf(self, mcore: Mcore) -> dict[str, object]:
        return self.backward(mcore)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether ``value`` is an ``int`` or ``float`` that a finite ``float`` can be. A ``bool`` is not a number here."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_dropout(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a probability with which a dropout may zero elements: from 0 to below 1."""
    return is_number(value) and 0 <= value < 1


_KINDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "int": ("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    "float": ("a finite number", is_number),
}
_ANY: tuple[str, Callable[[object], bool]] = ("anything", lambda value: True)


@functools.cache
def _kind(mcore: str) -> str:
    """The type of a field of megatron-core, as its annotation names it; "" if the annotation has several types."""
    from megatron.core.transformer import MLATransformerConfig

    known = {field.name: str(field.type) for field in dataclasses.fields(MLATransformerConfig)}
    known |= {"share_embeddings_and_output_weights": "bool", "embedding_dropout": "float", "router_norm_min": "float"}
    words = {*re.findall(r"\w+", known.get(mcore, ""))} - {"typing", "Optional", "Union", "None", "NoneType", "class"}
    return words.pop() if len(words) == 1 else ""


def to_mcore(table: tuple[Field, ...], hf: Hf) -> dict[str, object]:
    """Every mcore value that ``table`` decides for the config ``hf``, by name.

    Raises:
        ConfigError: an HF field is claimed by no entry, or holds a value that cannot be expressed exactly.
    """
    problems, values = [*_unclaimed(table, hf)], list[dict[str, object]]()
    cause: Exception | None = None
    for entry in table:
        try:
            values.append(entry.to_mcore(hf))
            require_ranges(hf, entry.names, values[-1])
        except ConfigError as error:
            problems.append(str(error))
        except Exception as error:  # an unexpected error means a value of another kind
            cause = cause or error
            fields = ", ".join(f"{name}={shown(hf[name])}" for name in entry.names if name in hf)
            problems.append(
                f"{fields} must be of the kinds that HF has there, but they raise {error!r:.200}. Correct them."
            )
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems))) from cause
    return _union(values, "mcore name")


def written(entry: Field, source: Hf, mcore: Mcore) -> dict[str, object]:
    """``entry.to_hf`` with the name that the field has in the config ``source``, which may be another of its names."""
    fields = entry.to_hf(mcore)
    if isinstance(entry, Map):
        own = next((name for name in entry.names if name in source), entry.hf)
        return {own: fields[entry.hf]}
    return fields


def to_hf(table: tuple[Field, ...], mcore: Mcore) -> dict[str, object]:
    """The inverse of ``to_mcore``: the HF fields that the table maps, from mcore values by name.

    Raises:
        ConfigError: the mcore values do not fit this architecture.
    """
    try:
        return _union([field.to_hf(mcore) for field in table], "HF field")
    except KeyError as error:
        raise ConfigError(
            f"The mcore side must hold {error.args[0]!r} to be written as an HF config, but it is missing. "
            "Pass the TransformerConfig together with the GPTModel arguments."
        ) from None


def count(hf: Hf, name: str, unset: int | None = None) -> int:
    """The value of field ``name``, or ``unset`` for None. It must be a positive whole number: a size or a count."""
    value = unset if hf.get(name) is None else hf[name]
    if not is_count(value):
        raise ConfigError(f"{name} must be a positive whole number, found {shown(value)}.")
    return value


def per_layer(mcore: Mcore, name: str, *, unset: bool, rule: Callable[[int, int], bool]) -> list[int]:
    """1 or 0 for each layer, from a field of mcore: a list of these, a number or None.

    Args:
        unset: the value of every layer if the field is None.
        rule: if the field is a number, computes the value of a layer from its index (from 0) and this number.
    """
    num_layers, value = count(mcore, "num_layers"), mcore[name]
    if value is None:
        return [int(unset)] * num_layers
    if isinstance(value, list | tuple):
        return [int(bool(layer)) for layer in value[:num_layers]]
    number = count(mcore, name)
    return [int(rule(layer, number)) for layer in range(num_layers)]


def claimed_by(table: tuple[Field, ...]) -> frozenset[str]:
    """The HF fields that a table claims, with any value.

    Raises:
        ConfigError: a field is claimed twice.
    """
    claims = Counter(name for entry in table for name in entry.names)
    if twice := sorted(name for name, count in claims.items() if count > 1):
        raise ConfigError(f"Each HF field must be claimed by one entry of the table; claimed twice: {twice}.")
    return frozenset(claims)


def require_total(table: tuple[Field, ...], hf: Hf) -> None:
    """Raises ``ConfigError`` unless each key of ``hf`` is claimed by exactly one entry."""
    for problem in _unclaimed(table, hf):
        raise ConfigError(problem)


def _unclaimed(table: tuple[Field, ...], hf: Hf) -> Iterator[str]:
    """A message about the keys of ``hf`` that no entry claims, if there are any."""
    if unclaimed := {name: hf[name] for name in sorted(hf.keys() - claimed_by(table))}:
        listing = ", ".join(f"{name}={shown(value)}" for name, value in unclaimed.items())
        yield (
            f"Every field of the HF config that may change what is computed must be accounted for; the table of "
            f"{hf.get('model_type')!r} does not know {listing}. If it changes nothing in the model, delete it from the "
            "config or add it to an Ignore entry of the architecture. If it does, the architecture needs an entry that "
            "maps it."
        )


def _union(parts: list[dict[str, object]], kind: str) -> dict[str, object]:
    whole: dict[str, object] = {}
    for part in parts:
        if twice := sorted(whole.keys() & part.keys()):
            raise ConfigError(f"Each {kind} must be decided by one entry of the table; decided twice: {twice}.")
        whole.update(part)
    return whole


LARGEST = 2**31 - 1
"""More than any dimension of a published tensor; products of several such sizes still have a meaning in 64 bits."""
SIZES = frozenset(
    {
        *("hidden_size", "ffn_hidden_size", "vocab_size", "hf_vocab_size", "num_layers", "kv_channels"),
        *("num_attention_heads", "num_query_groups", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "v_head_dim"),
        *("qk_pos_emb_head_dim", "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "expert_latent_size"),
        *("moe_shared_expert_intermediate_size", "dsa_indexer_head_dim", "dsa_indexer_n_heads"),
        *("dsa_indexer_topk", "dsa_indexer_block"),
        *("mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups", "mamba_conv_kernel"),
        *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
        *("linear_conv_kernel_dim", "short_conv_kernel", "value_channels"),
        *("query_rank", "output_groups", "output_rank"),
    }
)
"""The mcore names that are sizes or counts. If a model has the name, it must be positive."""


def _is_size(value: object) -> bool:
    return is_count(value) and value <= LARGEST


def _is_share(value: object) -> bool:
    return is_number(value) and 0 <= value <= 1


_RANGES: dict[str, tuple[str, Callable[[object], bool]]] = {
    **dict.fromkeys(SIZES, (f"a whole number from 1 to {LARGEST}", _is_size)),
    "qk_pos_emb_head_dim": (f"a whole number from 0 to {LARGEST}", lambda value: value == 0 or _is_size(value)),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "embedding_dropout"), ("a number from 0 to 1", _is_share)),
    "moe_router_topk_scaling_factor": ("a number other than 0, which megatron-core reads as no factor", bool),
    "logit_divisor": ("a number other than 0", bool),
    **dict.fromkeys(("mhc_num_residual_streams", "mhc_rank"), ("at least 1", is_count)),
    "layernorm_epsilon": ("a number from 0 up", lambda value: is_number(value) and value >= 0),
    "softmax_scale": ("a number above 0, as kernels need", lambda value: is_number(value) and value > 0),
}
"""The values that an mcore name may have, in words and as a check, where its type allows more. None is no value."""


def require_ranges(hf: Hf, names: tuple[str, ...], mcore: Mcore) -> None:
    """Raises ``ConfigError`` for values that ``_RANGES`` excludes, made from the fields ``names`` of ``hf``."""
    problems = []
    for name in sorted(_RANGES.keys() & mcore.keys()):
        (expected, is_one), value = _RANGES[name], mcore[name]
        if value is not None and not is_one(value):
            fields = ", ".join(f"{field}={shown(hf[field])}" for field in names if field in hf)
            problems.append(
                f"{fields or name} must give {expected}, found {shown(value)} as megatron-core's {name}. Correct it."
            )
    if problems:
        raise ConfigError("\n".join(problems))
