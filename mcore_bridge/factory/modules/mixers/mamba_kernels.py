"""The two operations of a Mamba-2 mixer: in torch on any device, or by kernels of mamba-ssm and causal-conv1d on a GPU.

The kernels take packed sequences in one call. They are used if both packages are installed and the dtype has 16 bits:
in fp32 Triton computes products in TF32, and torch does not. In torch, the recurrence runs over chunks of tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the usual name)

from mcore_bridge.factory.modules.backend import say

_CHUNK = 128
"""Tokens that the kernel computes together, as in megatron-core's mixer; the result does not depend on it."""
_MULTIPLE = 8
"""How many channels the kernel of the convolution reads at once for packed sequences."""
_WIDTHS = (2, 3, 4)
"""The widths of convolutions that have a kernel."""


class Operations(NamedTuple):
    """The two operations of a mixer that mix tokens.

    ``convolve`` takes ``xbc [b, s, n]``, the convolution and ``numbers``, and gives ``silu`` of its causal convolution.
    ``scan`` takes the arguments of ``mamba_scan.scan``, and ``numbers``. ``numbers`` is None, or int32 ``[b, s]``: the
    number of each token's sequence, from 0. ``packs``: whether ``numbers`` may be given.
    """

    convolve: Callable[[Tensor, nn.Conv1d, Tensor | None], Tensor]
    scan: Callable[..., Tensor]
    packs: bool


def operations_for(hidden: Tensor, convolution: nn.Conv1d) -> Operations:
    """The fastest operations for hidden states like these. If a GPU computes in torch, log the reason once.

    Args:
        hidden: hidden states on the mixer's device, in its dtype.
        convolution: the convolution of the mixer, with the channels of this rank.
    """
    if hidden.device.type != "cuda":
        return TORCH
    if lacking := _unfit(hidden.dtype, convolution) or _not_installed():
        say(f"{lacking}: Mamba-2 mixers compute in torch, which is slower")
        return TORCH
    return KERNELS


def _unfit(dtype: torch.dtype, convolution: nn.Conv1d) -> str:
    """The reason why the kernels cannot run for a mixer; "" if they can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"mamba-ssm's kernels are used for bf16 and fp16 only, found {dtype}"
    if convolution.in_channels % _MULTIPLE or convolution.kernel_size[0] not in _WIDTHS:
        return (
            f"causal-conv1d needs a multiple of {_MULTIPLE} channels and a width of {_WIDTHS}, found "
            f"{convolution.in_channels} and {convolution.kernel_size[0]}"
        )
    return ""


@functools.cache
def _not_installed() -> str:
    """The reason why the kernels cannot be imported; "" if they can. They are compiled for one torch and CUDA."""
    try:
        from causal_conv1d import causal_conv1d_fn  # noqa: F401
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined  # noqa: F401
    except ImportError as error:
        return f"causal-conv1d and mamba-ssm cannot be imported ({error})"
    return ""


def _convolve_in_torch(xbc: Tensor, convolution: nn.Conv1d, numbers: Tensor | None) -> Tensor:
    assert numbers is None
    past = F.pad(rearrange(xbc, "b s n -> b n s"), (convolution.kernel_size[0] - 1, 0))
    return rearrange(F.silu(convolution(past)), "b n s -> b s n")


def _scan_in_torch(*arguments: Tensor, numbers: Tensor | None) -> Tensor:
    assert numbers is None
    return scan(*arguments)


def _convolve_by_kernel(xbc: Tensor, convolution: nn.Conv1d, numbers: Tensor | None) -> Tensor:
    from causal_conv1d import causal_conv1d_fn

    weight = rearrange(convolution.weight, "n 1 width -> n width")
    last = xbc.contiguous().transpose(1, 2)  # for numbers of sequences, the kernel needs contiguous channels
    mixed: Tensor = causal_conv1d_fn(last, weight, convolution.bias, seq_idx=numbers, activation="silu")
    return mixed.transpose(1, 2)


def _scan_by_kernel(
    x: Tensor,
    steps: Tensor,
    decay: Tensor,
    into: Tensor,
    out_of: Tensor,
    skip: Tensor,
    *,
    numbers: Tensor | None,
) -> Tensor:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    scanned: Tensor = mamba_chunk_scan_combined(
        x, steps, decay, into, out_of, _CHUNK, D=skip.float(), seq_idx=numbers
    )  # neither dt_bias nor dt_limit: steps are positive already, and are not clamped
    return scanned


TORCH = Operations(_convolve_in_torch, _scan_in_torch, packs=False)
KERNELS = Operations(_convolve_by_kernel, _scan_by_kernel, packs=True)


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
