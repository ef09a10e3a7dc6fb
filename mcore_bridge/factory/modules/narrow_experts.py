"""Routed experts that are narrower than the model: one projection before all of them, and one after their sum.

megatron-core has such projections only with TransformerEngine (``moe_latent_size``). These are plain linear layers.
Every TP rank has them whole; the router and shared experts read the wide input.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.backend import mixed, submodules_of, with_module
from mcore_bridge.factory.modules.torch_modules import placement

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


def adapt_narrow_experts(layer: Any, config: TransformerConfig) -> None:
    """Puts projections around the experts of a layer, if ``config.expert_latent_size`` is set.

    Args:
        layer: the submodules of a layer, changed in place. A layer with a dense MLP stays unchanged.
        config: the config of the model.
    """
    if getattr(config, "expert_latent_size", None) is None or not hasattr(submodules_of(layer.mlp), "router"):
        return
    if config.moe_shared_expert_overlap:
        raise ConfigError(
            "moe_shared_expert_overlap must be False, found True: shared experts read another input than the narrow "
            "routed ones. Remove the override."
        )
    submodules = submodules_of(layer.mlp)
    submodules.experts = with_module(submodules.experts, functools.partial(mixed, NarrowExperts))
    layer.mlp = with_module(layer.mlp, functools.partial(mixed, NarrowLayer))


class NarrowExperts(nn.Module):
    """Experts whose inputs and outputs have the size ``config.expert_latent_size``."""

    def __init__(self, num_local_experts: int, config: Any, *arguments: Any, **named: Any) -> None:
        config = copy.copy(config)
        config.moe_latent_size = config.expert_latent_size
        super().__init__(num_local_experts, config, *arguments, **named)


class NarrowLayer(nn.Module):
    """megatron-core's layer of experts, with the two projections."""

    def __init__(self, config: Any, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        wide, narrow = config.hidden_size, config.expert_latent_size
        self.fc1_latent_proj = _linear(config, wide, narrow, config.init_method)
        self.fc2_latent_proj = _linear(config, narrow, wide, config.output_layer_init_method)

    def preprocess(self, hidden_states: Tensor, *routing: Any) -> Any:
        """Projects ``[..., hidden]`` before it is sent to the experts."""
        return super().preprocess(self.fc1_latent_proj(hidden_states), *routing)  # type: ignore[misc]

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """Projects the sum of the experts back, and adds the output of shared ones."""
        summed: Tensor = self.fc2_latent_proj(super().postprocess(output, None))  # type: ignore[misc]
        return summed if shared_expert_output is None else summed + shared_expert_output


def _linear(config: Any, inputs: int, outputs: int, initialise: Any) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=False, **placement(config))
    if config.perform_initialization:
        initialise(linear.weight)
    # With SP each TP rank has some tokens; finalize_model_grads sums the gradients of parameters with this attribute.
    linear.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return linear
