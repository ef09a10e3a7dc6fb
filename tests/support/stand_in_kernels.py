"""Stand-ins for the kernels of causal-conv1d and mamba-ssm, which need a GPU. They check arguments like the kernels.

Names, order and defaults of the arguments come from the source of causal-conv1d 1.7.0 and mamba-ssm 2.3.2, and so do
the checks of shapes, dtypes and strides. The results are computed token by token.
"""

import sys
import types
from typing import Any

import torch
from torch import Tensor


def install(monkeypatch: Any) -> list[str]:
    """Make both packages importable. Return the list of calls, to which each call adds its name."""
    calls: list[str] = []
    for name in ("causal_conv1d", "mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    combined: Any = types.ModuleType("mamba_ssm.ops.triton.ssd_combined")
    monkeypatch.setitem(sys.modules, combined.__name__, combined)
    convolution: Any = sys.modules["causal_conv1d"]
    for module, function in ((convolution, causal_conv1d_fn), (combined, mamba_chunk_scan_combined)):
        setattr(module, function.__name__, _counted(function, calls))
    return calls


def _counted(function: Any, calls: list[str]) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(function.__name__)
        return function(*args, **kwargs)

    return counted


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Any = None,
    return_final_states: bool = False,
    final_states_out: Any = None,
    activation: str | None = None,
) -> Tensor:
    """``x [batch, dim, seq]``, ``weight [dim, width]``: each channel by itself, from earlier tokens of its sequence."""
    batch, dim, length = x.shape
    assert weight.shape[0] == dim
    assert 2 <= weight.shape[1] <= 4
    assert bias is not None
    assert bias.shape == (dim,)
    assert bias.dtype == weight.dtype
    assert bias.stride(-1) == 1
    assert activation == "silu"
    assert x.stride(1) == 1
    assert dim % 8 == 0
    assert x.stride(0) % 8 == 0
    assert x.stride(2) % 8 == 0
    numbers = _numbers(seq_idx, batch, length)
    found = bias[None, :, None].expand(x.shape)
    for back in range(weight.shape[1]):
        past = torch.nn.functional.pad(x, (back, 0))[..., :length]
        same = torch.nn.functional.pad(numbers, (back, 0), value=-1)[:, :length] == numbers
        found = found + weight[:, -1 - back, None] * past * same[:, None]
    return torch.nn.functional.silu(found)


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803  (the kernel's name, as the next two)
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    chunk_size: int,
    D: Tensor | None = None,  # noqa: N803
    z: Any = None,
    dt_bias: Any = None,
    initial_states: Any = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Any = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Tensor:
    """``x [batch, seq, heads, dim]``, ``dt [batch, seq, heads]``, ``B`` and ``C`` ``[batch, seq, groups, state]``."""
    batch, length, heads, dim = x.shape
    groups, state_dim = B.shape[2:]
    assert B.shape == C.shape == (batch, length, groups, state_dim)
    assert heads % groups == 0
    assert dt.shape == (batch, length, heads)
    assert dt.dtype == torch.float32
    assert (dt > 0).all()
    assert A.shape == (heads,)
    assert A.dtype == torch.float32
    assert D is not None
    assert D.shape == (heads,)
    assert chunk_size & (chunk_size - 1) == 0
    assert not dt_softplus
    assert not (z is not None)
    assert not (dt_bias is not None)
    numbers = _numbers(seq_idx, batch, length)
    into, out_of = (part.repeat_interleave(heads // groups, dim=2).float() for part in (B, C))
    state = x.new_zeros(batch, heads, state_dim, dim, dtype=torch.float32)
    found = []
    for t in range(length):
        kept = (numbers[:, t] == numbers[:, t - 1])[:, None] if t else torch.zeros(batch, 1)
        decay = (dt[:, t] * A).exp() * kept
        learned = torch.einsum("bhn,bhp->bhnp", into[:, t], dt[:, t, :, None] * x[:, t])
        state = decay[..., None, None] * state + learned
        found.append(torch.einsum("bhnp,bhn->bhp", state, out_of[:, t]) + D[:, None] * x[:, t])
    return torch.stack(found, dim=1).to(x.dtype)


def _numbers(seq_idx: Tensor | None, batch: int, length: int) -> Tensor:
    if seq_idx is None:
        return torch.zeros(batch, length, dtype=torch.int32)
    assert seq_idx.shape == (batch, length)
    assert seq_idx.dtype == torch.int32
    assert seq_idx.is_contiguous()
    return seq_idx
