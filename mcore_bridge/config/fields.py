"""Config tables: each entry claims HF fields and reads them in both directions, and a table is total.

Every key of an HF config is claimed by exactly one entry; a key that none claims raises, because a field that is
dropped silently is how a model loads well and computes something else. On the mcore side ``TransformerConfig`` fields,
``GPTModel`` arguments and our own attributes form one flat mapping, so an entry need not say where its value lives.
"""

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Protocol

from mcore_bridge.errors import ConfigError

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
    """The HF field and the mcore name hold the same value. Without a default, the HF field must be there.

    ``aka`` are further spellings of the HF field, of which a config has one.
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
            raise ConfigError(f"{self.hf} must be set, because megatron-core's {self.mcore} follows it; found None.")
        expected, is_one = _KINDS.get(_kind(self.mcore), _ANY)
        if not is_one(value):
            raise ConfigError(
                f"{self.hf} must be {expected}, as megatron-core's {self.mcore} is, found {value!r}. Correct the HF "
                "config."
            )
        return {self.mcore: value}

    def to_hf(self, mcore: Mcore) -> dict[str, object]:
        return {self.hf: mcore[self.mcore]}


@dataclass(frozen=True, slots=True)
class Require:
    """The HF field is absent or has one of the values for which our mapping is exact; any other raises ``reason``."""

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
            raise ConfigError(f"{self.hf} must be {expected}, found {value!r}: {self.reason}.")
        return {}

    def to_hf(self, mcore: Mcore) -> dict[str, object]:
        return {}


@dataclass(frozen=True, slots=True)
class Const:
    """The architecture fixes the mcore value, and HF has no field for it. The way back raises when it was changed."""

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
    """What we set because mcore's default would differ from HF. It is free to override: no HF field depends on it."""

    def to_hf(self, mcore: Mcore) -> dict[str, object]:
        return {}


@dataclass(frozen=True, slots=True)
class Ignore:
    """HF fields that change nothing in the model that we build, and why."""

    reason: str
    names: tuple[str, ...]

    def to_mcore(self, hf: Hf) -> dict[str, object]:
        return {}

    def to_hf(self, mcore: Mcore) -> dict[str, object]:
        return {}


@dataclass(frozen=True, slots=True)
class Derive:
    """Several fields at once, by two functions that are each other's inverse.

    ``refuses`` says which values HF has and ``forward`` raises for, each as "what: why", for the documentation.
    """

    names: tuple[str, ...]
    forward: Callable[[Hf], dict[str, object]]
    backward: Callable[[Mcore], dict[str, object]]
    refuses: tuple[str, ...] = ()

    def to_mcore(self, hf: Hf) -> dict[str, object]:
        return self.forward(hf)

    def to_hf(self, mcore: Mcore) -> dict[str, object]:
        return self.backward(mcore)


def is_number(value: object) -> bool:
    """Whether it is an ``int`` or ``float`` to compute with: no switch, no NaN and no infinity."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


_KINDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "int": ("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    "float": ("a finite number", is_number),
}
_ANY: tuple[str, Callable[[object], bool]] = ("anything", lambda value: True)


@functools.cache
def _kind(mcore: str) -> str:
    """The type of a field of megatron-core, where it is one of ``_KINDS`` or None."""
    from megatron.core.transformer import MLATransformerConfig

    known = {each.name: str(each.type) for each in dataclasses.fields(MLATransformerConfig)}
    known |= {"share_embeddings_and_output_weights": "bool", "embedding_dropout": "float", "router_norm_min": "float"}
    words = {*re.findall(r"\w+", known.get(mcore, ""))} - {"typing", "Optional", "Union", "None", "NoneType", "class"}
    return words.pop() if len(words) == 1 else ""


def to_mcore(table: tuple[Field, ...], hf: Hf) -> dict[str, object]:
    """Reads ``hf`` by ``table``: every mcore value that the table decides, by name.

    Raises:
        ConfigError: an HF field is claimed by no entry, or holds a value that cannot be expressed exactly.
    """
    require_total(table, hf)
    return _union([field.to_mcore(hf) for field in table], "mcore name")


def to_hf(table: tuple[Field, ...], mcore: Mcore) -> dict[str, object]:
    """The inverse of ``to_mcore``: the HF fields that the table maps, from mcore values by name.

    Raises:
        ConfigError: the mcore values are not those of this architecture.
    """
    try:
        return _union([field.to_hf(mcore) for field in table], "HF field")
    except KeyError as error:
        raise ConfigError(
            f"The mcore side must hold {error.args[0]!r} to be written as an HF config, but it is missing. "
            "Pass the TransformerConfig together with the GPTModel arguments."
        ) from None


def count(hf: Hf, name: str) -> int:
    """The field ``name`` as a number of things, which every size in a config is."""
    value = hf.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a positive whole number, found {value!r}.")
    return value


def per_layer(mcore: Mcore, name: str, *, unset: bool, each: Callable[[int, int], bool]) -> list[int]:
    """1 or 0 for each layer, by a field of mcore that is a list of these, a number or None.

    Args:
        unset: what None says of every layer.
        each: what a number says of a layer, by the layer's own number (from 0) and this one.
    """
    num_layers, found = count(mcore, "num_layers"), mcore[name]
    if found is None:
        return [int(unset)] * num_layers
    if isinstance(found, list | tuple):
        return [int(bool(layer)) for layer in found[:num_layers]]
    number = count(mcore, name)
    return [int(each(layer, number)) for layer in range(num_layers)]


def require_total(table: tuple[Field, ...], hf: Hf) -> None:
    """Raises ``ConfigError`` unless each key of ``hf`` is claimed, and each claim is made once."""
    claims = Counter(name for field in table for name in field.names)
    if twice := sorted(name for name, count in claims.items() if count > 1):
        raise ConfigError(f"Each HF field must be claimed by one entry of the table; claimed twice: {twice}.")
    if unclaimed := {name: hf[name] for name in sorted(hf) if name not in claims}:
        listing = ", ".join(f"{name}={value!r}" for name, value in unclaimed.items())
        raise ConfigError(
            f"Every field of the HF config must be accounted for; the table of {hf.get('model_type')!r} does not know "
            f"{listing}. If it changes nothing in the model, delete it from the config or add it to an Ignore entry "
            "of the architecture; if it does, the architecture needs an entry that maps it."
        )


def _union(parts: list[dict[str, object]], kind: str) -> dict[str, object]:
    whole: dict[str, object] = {}
    for part in parts:
        if twice := sorted(whole.keys() & part.keys()):
            raise ConfigError(f"Each {kind} must be decided by one entry of the table; decided twice: {twice}.")
        whole.update(part)
    return whole
