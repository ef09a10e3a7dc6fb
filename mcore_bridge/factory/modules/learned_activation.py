"""MLPs whose activation has numbers of the checkpoint, as in Apertus.

Each tensor-parallel rank has these numbers, and applies them to its own features of the MLP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from mcore_bridge.config.tables.derived import xielu
from mcore_bridge.factory.modules.backend import LayerContext, mixed, with_module
from mcore_bridge.factory.modules.torch_modules import placement

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

_ALPHA, _BETA, _EPS = 0.8, 0.5, -1e-6


def adapt_activation(layer: Any, context: LayerContext) -> None:
    """Give the MLP of a layer an activation with numbers of its own, if ``activation_func`` of its config is xIELU."""
    if context.config.activation_func is not xielu:
        return
    layer.mlp = with_module(layer.mlp, lambda module: mixed(LearnedActivation, module))


class LearnedActivation(nn.Module):
    """An MLP with the module ``XIELU`` in the place of a function."""

    config: TransformerConfig
    tp_group: Any

    def __init__(self, *places: Any, **arguments: Any) -> None:
        super().__init__(*places, **arguments)
        self.activation_func = XIELU(self.config, self.tp_group)


class XIELU(MegatronModule):
    """The activation ``xielu`` with two trained numbers, and two that are not trained.

    The backward pass sums the gradients over ``tp``, so the trained numbers have no ``sequence_parallel`` attribute.
    """

    beta: Tensor
    eps: Tensor

    def __init__(self, config: TransformerConfig, tp_group: Any) -> None:
        super().__init__(config=config)
        self.tp_group, where = tp_group, placement(config)
        self.alpha_p = nn.Parameter(torch.full((1,), _ALPHA, **where).expm1().log())
        self.alpha_n = nn.Parameter(torch.full((1,), _ALPHA - _BETA, **where).expm1().log())
        self.register_buffer("beta", torch.full((1,), _BETA, **where))
        self.register_buffer("eps", torch.full((1,), _EPS, **where))

    def forward(self, hidden: Tensor) -> Tensor:
        """The activated features ``[s, b, features of this rank]``."""
        trained = copy_to_tensor_model_parallel_region(torch.cat((self.alpha_p, self.alpha_n)), self.tp_group)
        alpha_p, alpha_n = trained.split(1)
        return xielu(hidden, alpha_p, alpha_n, self.beta, self.eps)
