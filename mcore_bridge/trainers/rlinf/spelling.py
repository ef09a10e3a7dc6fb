"""Canonical names as a ``GPTModel`` with TransformerEngine's modules has them: what ``weights/names.py`` undoes."""

from __future__ import annotations

from collections.abc import Collection

NORMS = {
    "input_layernorm": "self_attention.linear_qkv",
    "pre_mlp_layernorm": "mlp.linear_fc1",
    "self_attention.q_layernorm": "self_attention.linear_q_up_proj",
    "self_attention.kv_layernorm": "self_attention.linear_kv_up_proj",
}
"""Norms that TransformerEngine fuses with the linear behind them, within a layer."""


def fused_norm(name: str, modules: Collection[str]) -> str | None:
    """The name of a norm that is fused with one of ``modules``, all within a layer; None of what is not."""
    norm, _, kind = name.rpartition(".")
    linear = NORMS.get(norm)
    return f"{linear}.layer_norm_{kind}" if linear in modules else None


def local_expert(name: str, expert: int, local: int, *, grouped: bool) -> str:
    """The name of the parameter of a routed expert, by its number on this rank."""
    before, _, after = name.partition(f".experts.{expert}.")
    return f"{before}.experts.{after}{local}" if grouped else f"{before}.experts.local_experts.{local}.{after}"
