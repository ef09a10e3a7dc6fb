"""HF tensors that engines fuse within one load call. An engine must get them together."""

from __future__ import annotations

import re

_FUSED = re.compile(
    r"(.*)\.(?:[qkv]_proj|q_a_proj|kv_a_proj_with_mqa|in_proj_\w+|gate_proj|up_proj|w1|w3"
    r"|(?<=\.indexer\.)(?:wk|weights_proj))\.(?:weight|bias)"
)
"""Projections of one input: of an attention, its indexer, a delta net, an MLP or an expert.

SGLang silently ignores latents (``q_a_proj`` and ``kv_a_proj_with_mqa``) if they come in two load calls. vLLM has one
parameter for ``wk`` and ``weights_proj`` of an indexer.
"""


def fused_module(name: str) -> str | None:
    """The module whose projections an engine fuses, with the HF tensor ``name`` among them; None if it fuses none.

    >>> fused_module("model.layers.3.self_attn.q_proj.weight"), fused_module("model.layers.3.self_attn.o_proj.weight")
    ('model.layers.3.self_attn', None)
    """
    match = _FUSED.fullmatch(name)
    return match[1] if match else None
