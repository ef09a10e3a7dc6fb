"""Freezes parameters by patterns of names. A pattern that matches no parameter of the model raises."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from mcore_bridge.errors import ConfigError
from mcore_bridge.weights.model_tensors import held_tensors
from mcore_bridge.weights.transfer.collectives import Group

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


def require_patterns(patterns: object) -> None:
    """Raise ``ConfigError`` unless ``patterns`` is a collection of strings. A single string is refused."""
    if isinstance(patterns, str) or not isinstance(patterns, Collection):
        raise ConfigError(f"freeze must be a list of patterns, found {patterns!r}: write freeze=[{patterns!r}]")
    if wrong := [pattern for pattern in patterns if not isinstance(pattern, str)]:
        raise ConfigError(f"freeze must be a list of patterns, which are strings, found {wrong} in it: pass strings")


def freeze_parameters(chunks: Sequence[GPTModel], patterns: Sequence[str]) -> None:
    """Freeze the parameters whose canonical name matches one of the ``fnmatch`` patterns.

    If there are patterns, all ranks must call this together, since other ranks have other names.

    Args:
        chunks: the bare chunks of this rank, from ``build_model``.
        patterns: such as "embedding.*" or "decoder.layers.0.*". Numbers of layers and experts are global. A pattern
            after "!" makes parameters trainable again. The last pattern that matches a parameter decides.

    Raises:
        ConfigError: on every rank, when patterns match no parameter of any rank.
    """
    if not patterns:
        return
    here = {name: tensor for name, tensor in held_tensors(chunks).items() if isinstance(tensor, nn.Parameter)}
    matches = {written: [name for name in here if fnmatchcase(name, written.removeprefix("!"))] for written in patterns}
    _require_matches(matches, [*here], Group.of_replica(chunks[0].pg_collection))
    for written in patterns:
        for name in matches[written]:
            here[name].requires_grad_(written.startswith("!"))


def _require_matches(matches: dict[str, list[str]], here: list[str], group: Group) -> None:
    """Raise ``ConfigError`` on all ranks of ``group`` unless each pattern matches a name on one of them."""
    if group.size > 1 and group.is_fake:
        return  # no rank answers
    answers = group.all_gather_object([(written, bool(names)) for written, names in matches.items()])
    matching = dict(sorted(pair for answer in answers for pair in answer))  # True sorts after False, and is kept
    if missing := [written for written, matches_some in matching.items() if not matches_some]:
        names = sorted({name for own in group.all_gather_object(here) for name in own})
        near = {written: get_close_matches(written.removeprefix("!"), names, n=3, cutoff=0.3) for written in missing}
        raise ConfigError(
            "each pattern of freeze must match a parameter, found patterns that match none; correct them; their "
            f"nearest names: {near}"
        )
