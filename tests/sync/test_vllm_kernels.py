"""After a reload, kernels of vLLM's experts read the tensors that they read before it.

The classes here stand for the few attributes of vLLM 0.24 that matter: ``tests/gpu/test_gpu_vllm.py`` has vLLM itself.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from mcore_bridge.engines.vllm import _hidden_weights, kernels_kept


@dataclass
class Wrapped:
    """A weight for a kernel of Triton."""

    data: Tensor


@dataclass
class Config:
    """What a kernel is made of."""

    scale: Tensor
    alpha: Tensor | None = None


class Method:
    """The method of a layer with experts. Layers may share it."""

    moe_quant_config = None

    def process(self, layer, *, computes):
        with torch.inference_mode():
            alpha = 2 * layer.scale if computes else None
        self.moe_quant_config = Config(layer.scale, alpha)
        self.moe_kernel = [self.moe_quant_config]


class ModuleMethod(nn.Module, Method):
    """A method of vLLM 0.32, where it is a module of its layer."""


class Experts(nn.Module):
    """A layer with experts; some wrap their weights."""

    def __init__(self, *, computes=False, wraps=False, method=Method):
        super().__init__()
        self.computes, self.wraps, self.quant_method = computes, wraps, method()
        self.load(1.0)

    def load(self, value):
        """Make parameters, and what kernels read. The weight is a parameter until it is wrapped."""
        self.scale = nn.Parameter(torch.full((4,), value), requires_grad=False)
        self.register_parameter("weight", nn.Parameter(torch.full((3,), value), requires_grad=False))
        if self.wraps:
            with torch.inference_mode():
                weight = Wrapped(self.weight.clone())
            del self.weight
            self.weight = weight
        self.quant_method.process(self, computes=self.computes)


def reload(model, value):
    """As vLLM's: kernels are made of temporary parameters, whose values are copied to where the parameters were."""
    for layer in (layer for layer in model if isinstance(layer, Experts)):
        before = dict(layer.named_parameters())
        layer.load(value)
        for name, parameter in before.items():
            parameter.copy_(getattr(layer, name))
            setattr(layer, name, parameter)


@pytest.mark.parametrize(
    ("how", "hidden"),
    [
        ({}, ""),
        ({"computes": True}, "no map reaches"),
        ({"wraps": True}, "no map reaches"),
        ({"method": ModuleMethod}, ""),
    ],
)
def test_kernels_read_what_is_written_after_a_reload(how, hidden):
    model = nn.Sequential(Experts(**how), nn.Linear(2, 2), nn.Module())
    layer = model[0]
    model[2].runs, model[2].quant_method = how, layer.quant_method  # vLLM's runner shares the method of its layer
    assert hidden in _hidden_weights(model, torch.device("cuda"))
    kernel, config, weight = layer.quant_method.moe_kernel, layer.quant_method.moe_quant_config, layer.weight
    scale = config.scale.data_ptr()
    with torch.no_grad(), kernels_kept(model):
        reload(model, 3.0)
    assert layer.quant_method.moe_kernel is kernel
    assert layer.quant_method.moe_quant_config is config
    assert config.scale.data_ptr() == layer.scale.data_ptr() == scale
    assert config.scale.tolist() == [3.0] * 4
    if how.get("computes"):
        assert config.alpha.tolist() == [6.0] * 4
    if how.get("wraps"):
        assert layer.weight is weight
        assert weight.data.tolist() == [3.0] * 3


def test_a_reload_that_brings_nothing_keeps_wrapped_weights():
    model = nn.Sequential(Experts(wraps=True))
    weight = model[0].weight
    with kernels_kept(model):
        assert not hasattr(model[0], "weight")
    assert model[0].weight is weight
