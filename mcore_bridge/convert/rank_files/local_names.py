"""Translate canonical names to names in a ``GPTModel``: the inverse of ``rules/names.py``."""

from __future__ import annotations

from collections.abc import Mapping


def fused_norm(name: str, fused: Mapping[str, str]) -> str | None:
    """The name of a norm that TransformerEngine fuses; None for any other parameter.

    Args:
        fused: the ``fused_norms`` of its layer.
    """
    norm, dot, kind = name.rpartition(".")
    linear = fused.get(norm + dot)
    return None if linear is None else f"{linear}{kind}"


def local_expert(name: str, expert: int, local: int, *, grouped: bool) -> str:
    """The name of the parameter of a routed expert, by its number on this rank."""
    before, _, after = name.partition(f".experts.{expert}.")
    return f"{before}.experts.{after}{local}" if grouped else f"{before}.experts.local_experts.{local}.{after}"
