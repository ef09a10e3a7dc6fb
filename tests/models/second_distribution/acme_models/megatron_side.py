"""The Acme model in megatron-core: a norm in its spec slot, and a subclass of GPTModel."""

import torch
from megatron.core.models.gpt import GPTModel

from mcore_bridge.factory.layer_specs import block_spec
from mcore_bridge.factory.modules.torch_modules import Norm


class GainedNorm(Norm):
    def __init__(self, config, hidden_size, **arguments):
        super().__init__(config, hidden_size, **arguments)
        self.gain = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.gain.sequence_parallel = config.sequence_parallel

    def forward(self, x):
        return super().forward(x) * self.gain


class AcmeGPT(GPTModel):
    pass


def layer_spec(config, layers, *, backend):
    spec = block_spec(config, layers, backend=backend)
    for layer in spec.layer_specs:
        layer.submodules.input_layernorm = GainedNorm
    return spec
