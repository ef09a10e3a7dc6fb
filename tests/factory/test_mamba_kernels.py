"""Mamba-2 mixers with the kernels of mamba-ssm and causal-conv1d: when they are used, their arguments, equal results.

The kernels need a GPU. Here stand-ins with equal arguments replace them; ``tests/gpu/test_gpu_mamba.py`` runs the
kernels themselves.
"""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

import mcore_bridge as mb
from mcore_bridge.factory.modules.mixers import mamba_kernels
from mcore_bridge.factory.modules.mixers import mamba_mixer as mamba
from mcore_bridge.factory.modules.mixers.mamba_kernels import KERNELS, TORCH, operations_for
from mcore_bridge.launch.fake_rank import rank_of
from tests import zoo
from tests.support import stand_in_kernels, tiny
from tests.support.bounds import ONE

LENGTHS = [5, 1, 70, 3]


@pytest.fixture
def calls(monkeypatch: Any) -> list[str]:
    mamba_kernels._not_installed.cache_clear()
    yield stand_in_kernels.install(monkeypatch)
    mamba_kernels._not_installed.cache_clear()


def hidden(dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Any:
    return SimpleNamespace(dtype=dtype, device=torch.device(device))


def convolution(channels: int = 16, width: int = 4) -> torch.nn.Conv1d:
    return torch.nn.Conv1d(channels, channels, width, groups=channels)


@pytest.mark.usefixtures("calls")
def test_kernels_are_for_halves_on_a_gpu_and_sizes_that_they_take(caplog: Any) -> None:
    assert operations_for(hidden(), convolution()) is KERNELS
    assert operations_for(hidden(torch.float16), convolution(8, 2)) is KERNELS
    with caplog.at_level(logging.WARNING, logger="mcore_bridge"):
        assert operations_for(hidden(device="cpu"), convolution()) is TORCH
        assert not caplog.messages
        assert operations_for(hidden(torch.float32), convolution()) is TORCH
        assert operations_for(hidden(), convolution(12)) is TORCH
        assert operations_for(hidden(), convolution(16, 5)) is TORCH
    for words, message in zip(["float32", "found 12 and 4", "found 16 and 5"], caplog.messages, strict=True):
        assert words in message
        assert message.endswith("compute in torch, which is slower")


@pytest.mark.skipif(not mamba_kernels._not_installed(), reason="the kernels are installed")
def test_without_the_packages_a_gpu_computes_in_torch_and_says_why(caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, logger="mcore_bridge"):
        assert operations_for(hidden(), convolution()) is TORCH
    assert "No module named" in caplog.messages[0]


def learned(mixer: Any, given: Tensor, packed: Any) -> dict[str, Tensor]:
    """The output of a mixer, and the gradients of its inputs and parameters."""
    inputs = given.clone().requires_grad_()
    mixer.zero_grad(set_to_none=True)
    output, _ = mixer(inputs, packed_seq_params=packed)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    (output * weight).sum().backward()
    return {"output": output.detach(), "input": inputs.grad, **{n: p.grad for n, p in mixer.named_parameters()}}


@pytest.mark.skipif("nemotron_h" not in zoo.cases(), reason="the installed transformers has no family with mixers")
def test_the_kernels_get_what_torch_computes_with(calls: list[str], monkeypatch: Any) -> None:
    """The inputs are rows, or packed sequences in one call. No sequence depends on the one before."""
    hf = zoo.cases()["nemotron_h"].hf
    with rank_of(ONE, 0, 1):
        (model,) = mb.build_model(hf, dims=ONE, dtype=torch.float32, device="cpu", load_weights=False)
        mixer = model.decoder.layers[0].self_attention
        starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in mixer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        for packed, rows in ((PackedSeqParams("thd", starts, starts), 1), (None, 2)):
            given = torch.randn(sum(LENGTHS), rows, hf.hidden_size, generator=generator)
            expected = learned(mixer, given, packed)
            assert not calls
            with monkeypatch.context() as patch:
                patch.setattr(mamba, "operations_for", lambda *given: KERNELS)
                found = learned(mixer, given, packed)
            assert calls == ["causal_conv1d_fn", "mamba_chunk_scan_combined"]
            calls.clear()
            tiny.assert_near(found, expected, f"packed: {packed is not None}")
