"""Freezes parameters by name. A pattern that matches no parameter of the model raises."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from mcore_bridge.config.tables.derived_hybrid import has_half
from mcore_bridge.errors import ConfigError
from mcore_bridge.rules.names import TOWER
from mcore_bridge.weights.model_tensors import held_tensors

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


def require_patterns(patterns: object) -> None:
    """Raise ``ConfigError`` unless ``patterns`` is a collection of strings. A single string is not: it has letters."""
    if isinstance(patterns, str) or not isinstance(patterns, Collection):
        raise ConfigError(f"freeze must be a list of patterns, found {patterns!r}: write freeze=[{patterns!r}]")
    if wrong := [pattern for pattern in patterns if not isinstance(pattern, str)]:
        raise ConfigError(f"freeze must be a list of patterns, which are strings, found {wrong} in it")


def freeze_parameters(chunks: Sequence[GPTModel], patterns: Sequence[str]) -> None:
    """Freeze the parameters whose canonical name matches one of the ``fnmatch`` patterns.

    Args:
        chunks: the bare chunks of this rank, from ``build_model``.
        patterns: such as "embedding.*" or "decoder.layers.0.*". Layer numbers are those of the whole model. A pattern
            behind "!" has parameters trained again. The last pattern that matches a parameter decides.

    Raises:
        ConfigError: a pattern matches no parameter, neither on this pipeline stage nor on another.
    """
    here = {name: tensor for name, tensor in held_tensors(chunks).items() if isinstance(tensor, nn.Parameter)}
    everywhere = [*here, *_elsewhere(chunks[0])] if patterns else []
    for written in patterns:
        pattern = written.removeprefix("!")
        if not any(fnmatchcase(name, pattern) for name in everywhere):
            near = get_close_matches(pattern, everywhere, n=3, cutoff=0.3)
            raise ConfigError(
                f"each pattern of freeze must match a parameter, found {written!r}, which matches none; nearest names: "
                f"{near}"
            )
        for name, parameter in here.items():
            if fnmatchcase(name, pattern):
                parameter.requires_grad_(pattern != written)


def _elsewhere(chunk: GPTModel) -> Iterator[str]:
    """The names that other pipeline stages may hold. They follow from the rules, without communication."""
    config = chunk.config
    if config.pipeline_model_parallel_size == 1:
        return
    yield from (f"{TOWER}{spec.name}" for spec in chunk.bridge.tower)
    for rule in chunk.bridge.mapping(tied=chunk.share_embeddings_and_output_weights).rules:
        if rule.mcore.startswith("decoder.layers.*"):
            layers = (layer for layer in range(config.num_layers) if has_half(config, layer, rule.mcore))
            yield from (rule.mcore.replace("*", str(layer), 1) for layer in layers)
        else:
            yield rule.mcore
