"""Acme is Llama whose first norm of each layer has a gain beside its weight."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm


class AcmeConfig(LlamaConfig):
    model_type = "acme"


class AcmeNorm(LlamaRMSNorm):
    def __init__(self, hidden_size, eps):
        super().__init__(hidden_size, eps)
        self.gain = torch.nn.Parameter(torch.ones(hidden_size))

    def forward(self, hidden_states):
        return super().forward(hidden_states) * self.gain


class AcmeForCausalLM(LlamaForCausalLM):
    config_class = AcmeConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.input_layernorm = AcmeNorm(config.hidden_size, config.rms_norm_eps)


AutoConfig.register("acme", AcmeConfig)
AutoModelForCausalLM.register(AcmeConfig, AcmeForCausalLM)
