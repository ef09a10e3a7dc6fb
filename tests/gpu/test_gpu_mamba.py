"""Mamba-2 mixers by the kernels of mamba-ssm and causal-conv1d, on a real GPU.

The reference is torch in fp32. In bf16 outputs and gradients may have three times the error of torch in bf16: the
kernels keep the states between chunks in bf16, and the gradients of D and A have few numbers. Packed sequences are in
one call, and each begins with an empty state.
"""

import importlib.util
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_bridge.factory.modules.mixers import mamba_kernels
from mcore_bridge.factory.modules.mixers.mamba_kernels import KERNELS, TORCH, operations_for
from tests.support import stand_in_kernels

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(not importlib.util.find_spec("mamba_ssm"), reason="needs mamba-ssm and causal-conv1d"),
]

HEADS, DIM, GROUPS, STATE, WIDTH = 8, 64, 2, 128, 4
LENGTHS = [300, 1, 129, 77, 5]
ROUNDED = 3  # times as far from fp32 as torch's operations in bf16


def test_the_stand_ins_have_the_arguments_of_the_kernels() -> None:
    assert not mamba_kernels._not_installed()
    from causal_conv1d import causal_conv1d_fn
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    for function in (causal_conv1d_fn, mamba_chunk_scan_combined):
        stand_in = getattr(stand_in_kernels, function.__name__)
        assert [*inspect.signature(function).parameters] == [*inspect.signature(stand_in).parameters]


def mixed(operations: Any, dtype: torch.dtype, rows: int, numbers: Tensor | None) -> list[Tensor]:
    """The convolution and the recurrence of a mixer, and all gradients. In torch, packed sequences go one by one."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    channels, length = HEADS * DIM + 2 * GROUPS * STATE, sum(LENGTHS)
    convolution = nn.Conv1d(channels, channels, WIDTH, groups=channels, device="cuda", dtype=dtype)
    with torch.no_grad():
        for parameter in convolution.parameters():
            parameter.copy_(draw(*parameter.shape) * 0.5)
    xbc, skip = (part.to(dtype).requires_grad_() for part in (draw(rows, length, channels), draw(HEADS)))
    steps = nn.functional.softplus(draw(rows, length, HEADS) - 2).requires_grad_()
    decay, weight = (-draw(HEADS).exp()).requires_grad_(), draw(rows, length, HEADS, DIM)

    def one(xbc: Tensor, steps: Tensor, numbers: Tensor | None) -> Tensor:
        found = operations.convolve(xbc, convolution, numbers)
        x, into, out_of = found.split([HEADS * DIM, GROUPS * STATE, GROUPS * STATE], dim=-1)
        x = x.unflatten(-1, (HEADS, DIM))
        into, out_of = (part.unflatten(-1, (GROUPS, STATE)) for part in (into, out_of))
        output: Tensor = operations.scan(x, steps, decay, into, out_of, skip, numbers=numbers)
        return output

    if numbers is not None and not operations.packs:
        pieces = zip(xbc.split(LENGTHS, 1), steps.split(LENGTHS, 1), strict=True)
        output = torch.cat([one(*piece, None) for piece in pieces], dim=1)
    else:
        output = one(xbc, steps, numbers)
    (output.float() * weight).sum().backward()
    leaves = [xbc, skip, steps, decay, *convolution.parameters()]
    return [output.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[misc]


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_kernels_are_as_near_to_fp32_as_torch_is(packed: bool) -> None:
    lengths = torch.tensor(LENGTHS, device="cuda")
    numbers = torch.arange(len(LENGTHS), device="cuda", dtype=torch.int32).repeat_interleave(lengths)[None]
    given: tuple[int, Tensor | None] = (1, numbers) if packed else (3, None)
    exact = mixed(TORCH, torch.float32, *given)
    ours, theirs = (mixed(each, torch.bfloat16, *given) for each in (TORCH, KERNELS))
    for name, known, torchs, kernels in zip(
        ("output", "xbc", "D", "steps", "A", "weight", "bias"), exact, ours, theirs, strict=True
    ):
        allowed, found = (float((each.float() - known).norm() / known.norm()) for each in (torchs, kernels))
        print(name, "torch in bf16:", allowed, "kernels:", found, flush=True)
        assert found < ROUNDED * allowed, name


def test_a_gpu_uses_them_in_bf16() -> None:
    convolution = nn.Conv1d(16, 16, WIDTH, groups=16)
    assert operations_for(torch.empty(0, device="cuda", dtype=torch.bfloat16), convolution) is KERNELS
    assert operations_for(torch.empty(0, device="cuda"), convolution) is TORCH
