"""The recurrence of Mamba-2 in plain torch, a chunk of tokens at a time."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

CHUNK = 64
"""Tokens that are computed together; the result does not depend on it."""


def scan(x: Tensor, steps: Tensor, decay: Tensor, into: Tensor, out_of: Tensor, skip: Tensor) -> Tensor:
    """The state of each head decays at each token, and its input is added.

    ``S[t] = exp(steps[t] * decay) S[t-1] + into[t] (x) steps[t] x[t]``, and the output is
    ``S[t]^T out_of[t] + skip * x[t]``. All is in fp32.

    Args:
        x: ``[b, s, heads, dim]``.
        steps: ``[b, s, heads]``, positive.
        decay: ``[heads]``, negative.
        into: ``[b, s, groups, state]``, called B; the heads of a group share it.
        out_of: ``[b, s, groups, state]``, called C.
        skip: ``[heads]``, called D.

    Returns:
        ``[b, s, heads, dim]`` in fp32.
    """
    groups, heads = into.size(2), x.size(2)
    values, steps = (rearrange(part.float(), "b s (g r) ... -> b g r s ...", g=groups) for part in (x, steps))
    keys, queries = (rearrange(part.float(), "b s g n -> b g 1 s n") for part in (into, out_of))
    rate = decay.float().view(groups, heads // groups, 1)
    state = values.new_zeros(*values.shape[:3], keys.size(-1), values.size(-1))
    outputs = []
    for v, d, k, q in zip(*(part.split(CHUNK, dim=3) for part in (values, steps, keys, queries)), strict=True):
        since = (d * rate).cumsum(-1)  # log of the decay since the start of the chunk
        between = (since[..., :, None] - since[..., None, :]).masked_fill(_ahead(since), float("-inf")).exp()
        learned = v * d[..., None]
        outputs.append(((q @ k.mT) * between) @ learned + since.exp()[..., None] * (q @ state))
        left = (since[..., -1:] - since).exp()[..., None]
        state = since[..., -1:, None].exp() * state + (left * k).mT @ learned
    output = rearrange(torch.cat(outputs, dim=3), "b g r s d -> b s (g r) d")
    return output + skip.float()[:, None] * x.float()


def _ahead(since: Tensor) -> Tensor:
    size = since.size(-1)
    return torch.ones(size, size, dtype=torch.bool, device=since.device).triu(1)
