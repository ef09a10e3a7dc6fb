"""Experts beside a dense MLP: both read the input of the layer's MLP, each through a norm of its own.

The dense MLP has the place of megatron-core's shared expert. The router may read its input through a norm without
weights and a scale for each element, and multiply the weight of each expert by a number.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor, nn

from mcore_bridge.factory.modules.backend import LayerContext, mixed, norm_of, submodules_of, with_module
from mcore_bridge.factory.modules.experts import require_no_overlap
from mcore_bridge.factory.modules.norms import post_normed
from mcore_bridge.factory.modules.torch_modules import UnitNorm, placement

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


def adapt_experts_beside(layer: Any, context: LayerContext) -> None:
    """Set the routed experts of a layer beside its dense MLP, and scale its router, if its config asks for it.

    The attributes of the config are ``experts_beside_mlp`` and ``router_scales``.
    """
    config, submodules = context.config, submodules_of(layer.mlp)
    if not hasattr(submodules, "router"):
        return
    if getattr(config, "router_scales", False):
        submodules.router = mixed(ScaledRouter, submodules.router)
    if getattr(config, "experts_beside_mlp", False):
        require_no_overlap(config)
        norm = norm_of(context.backend, config)
        layer.pre_mlp_layernorm = IdentityOp
        dense = submodules_of(submodules.shared_experts)
        dense.linear_fc2 = post_normed(dense.linear_fc2, norm)
        layer.mlp = with_module(layer.mlp, functools.partial(_beside, norm=norm))


@functools.cache
def _beside(module: type, *, norm: type) -> type:
    return type(f"Beside{module.__name__}", (Beside, module), {"norm": norm, "__doc__": Beside.__doc__})


class Beside(nn.Module):
    """megatron-core's layer of experts with a norm before the dense MLP, one before the experts, and one after them."""

    norm: ClassVar[type]

    def __init__(self, config: TransformerConfig, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        norm = functools.partial(self.norm, config, config.hidden_size, eps=config.layernorm_epsilon)
        self.dense_layernorm, self.routed_layernorm, self.routed_post_layernorm = norm(), norm(), norm()

    def shared_experts_compute(self, hidden_states: Tensor) -> Tensor:
        """The dense MLP, of ``[s, b, h]``."""
        output: Tensor = super().shared_experts_compute(self.dense_layernorm(hidden_states))  # type: ignore[misc]
        return output

    def preprocess(self, hidden_states: Tensor, *routing: Any) -> Any:
        """Norm ``[s, b, h]`` before it is sent to the experts. The router has read it before the norm."""
        return super().preprocess(self.routed_layernorm(hidden_states), *routing)  # type: ignore[misc]

    def postprocess(self, output: Tensor, shared_expert_output: Tensor) -> Tensor:
        """Norm the sum of the experts, and add the output of the dense MLP."""
        summed: Tensor = super().postprocess(output, None)  # type: ignore[misc]
        return shared_expert_output + self.routed_post_layernorm(summed)


class ScaledRouter(nn.Module):
    """A router that norms and scales its input, and multiplies the weight of each expert by a number."""

    def __init__(self, config: TransformerConfig, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        self.norm = UnitNorm(config, config.hidden_size, eps=config.layernorm_epsilon)
        self.root = config.hidden_size**-0.5
        self.input_scale = ones(config, config.hidden_size)
        self.expert_scale = ones(config, config.num_moe_experts)

    def forward(self, input: Tensor, *mask: Any) -> tuple[Tensor, Tensor]:
        """Weights ``[tokens, experts]``, zero for experts that are not chosen, and which are; of ``[s, b, h]``."""
        weights, chosen = super().forward(self.norm(input) * self.input_scale * self.root, *mask)
        return weights * self.expert_scale, chosen


def ones(config: TransformerConfig, size: int | None) -> nn.Parameter:
    """A parameter of ones that each TP rank applies to its own tokens."""
    assert size is not None
    parameter = nn.Parameter(torch.ones(size, **placement(config)))
    # With SP each TP rank has some tokens; finalize_model_grads sums the gradients of parameters with this attribute.
    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return parameter
