"""Names of a model without its head, as embedding models have them: `layers.0.`, where others have `model.` first.

transformers saves its base models so, and adds the prefix where it reads such a file into a model with a head.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from mcore_bridge.rules.mapping import embedding_names

if TYPE_CHECKING:
    from mcore_bridge.rules.mapping import WeightMapping

Value = TypeVar("Value")


def base_names(source: Iterable[str], mapping: WeightMapping) -> dict[str, str]:
    """What the names in a source are in the model, if they are those of a base model; empty if they are not."""
    prefix, names = _prefix(mapping), frozenset(source)
    if not prefix or not _has_bare_embedding(names, prefix, mapping):
        return {}
    return {name: f"{prefix}{name}" for name in names if mapping.consumers(f"{prefix}{name}")}


def with_prefix(pairs: Iterable[tuple[str, Value]], mapping: WeightMapping) -> Iterator[tuple[str, Value]]:
    """The same pairs; names that only a base model has get the prefix."""
    prefix = _prefix(mapping)
    for name, value in pairs:
        is_bare = bool(prefix) and not mapping.consumers(name) and bool(mapping.consumers(f"{prefix}{name}"))
        yield f"{prefix}{name}" if is_bare else name, value


def prefix_of(embedding: str) -> str:
    """The first word of an embedding's name, with its dot; empty if it has one word before its last."""
    return f"{embedding.partition('.')[0]}." if embedding.count(".") > 1 else ""


def _prefix(mapping: WeightMapping) -> str:
    return next(filter(None, map(prefix_of, embedding_names(mapping.rules))), "")


def _has_bare_embedding(names: Container[str], prefix: str, mapping: WeightMapping) -> bool:
    return any(name not in names and name.removeprefix(prefix) in names for name in embedding_names(mapping.rules))
