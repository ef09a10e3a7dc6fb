"""Routers and linear layers for routed experts, if megatron-core's do not work; and experts that are narrower than the
model.

Narrow experts have one projection before all of them, and one after their sum. megatron-core has such projections only
with TransformerEngine (``moe_latent_size``). Here they are plain linear layers, and every TP rank holds them whole. The
router and shared experts read the wide input.
"""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.backend import LayerContext, mixed, submodules_of, with_module
from mcore_bridge.factory.modules.torch_modules import placement

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatron.core.transformer import TransformerConfig

    Compute = Callable[..., tuple[Tensor, Tensor]]


_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class BiasedRouter(TopKRouter):
    """megatron-core's router with a bias for softmax scores, which only changes the choice of experts.

    It also corrects an error of mcore: with a padding mask, its counting of tokens per expert fails (0.16.1 to 0.19.2).

    mcore asks the ``RouterReplay`` of a layer, if there is one, for the experts and weights of each token. We replace a
    method of this object, which first calls the original method. So all other behaviour, also replay, is mcore's.
    """

    def __init__(self, config: TransformerConfig, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        if not has_softmax_bias(config):
            return
        if config.moe_router_fusion:
            raise ConfigError(
                "moe_router_fusion must be False, found True: the fused kernel has no bias for softmax scores. Remove "
                "the override."
            )
        self.router_replay: Any = self.router_replay or SimpleNamespace(get_replay_topk=_computed)
        self.router_replay.get_replay_topk = functools.partial(self._chosen, self.router_replay.get_replay_topk)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Counts tokens per expert from ``[tokens, experts]``, without the tokens of the mask ``[tokens]``."""
        super()._apply_expert_bias(routing_map, None if padding_mask is None else padding_mask[:, None])

    def _chosen(
        self, ask: Compute, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, compute: Compute
    ) -> tuple[Tensor, Tensor]:
        """Weights and indices ``[tokens, topk]`` of the chosen experts, from ``scores`` ``[tokens, experts]``."""
        _, experts = ask(scores + self.expert_bias, topk, num_groups, group_topk, compute)
        weights = scores.gather(1, experts)
        return weights / weights.sum(-1, keepdim=True).clamp(min=self.config.router_norm_min), experts


class Router(BiasedRouter):
    """``BiasedRouter`` with a plain matrix product, for which 0.16.1 needs TransformerEngine."""

    def gating(self, input: Tensor) -> Tensor:
        """``[..., hidden]`` to logits ``[..., experts]``, in ``moe_router_dtype`` or else in the dtype of the input."""
        dtype = _DTYPES.get(self.config.moe_router_dtype, input.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return torch.nn.functional.linear(input.to(dtype), self.weight.to(dtype), bias)


class ExpertRowParallelLinear(RowParallelLinear):
    """The second linear layer of an expert with biases. It corrects two errors of megatron-core (0.16.1 to 0.19.2).

    mcore marks the bias as sequence parallel, so its gradients are summed twice. At tp=1, ep=1 its output is a view of
    an autograd function; ``MLP`` adds the bias in place, and autograd raises.
    """

    def __init__(self, input_size: int, output_size: int, **arguments: Any) -> None:
        super().__init__(input_size, output_size, **arguments)
        self.bias.sequence_parallel = False

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """``[tokens, inner / etp]`` to ``[tokens, hidden]``, not yet summed over ETP; and the bias, not yet added."""
        output, bias = super().forward(input_)
        return output.clone(), bias


def has_softmax_bias(config: TransformerConfig) -> bool:
    """Whether the router has softmax scores and a bias."""
    return bool(config.moe_router_enable_expert_bias and config.moe_router_score_function == "softmax")


def adapt_experts(layer: Any, context: LayerContext) -> None:
    """Puts our router and linear layer into a layer's spec, if the layer has routed experts and needs them."""
    submodules = submodules_of(layer.mlp)
    if not hasattr(submodules, "router"):
        return
    if context.backend == "torch":
        submodules.router = Router
        if context.config.add_bias_linear:  # only then: ModelOpt knows megatron-core's class, and not ours
            submodules_of(submodules.experts).linear_fc2 = ExpertRowParallelLinear
    elif context.config.moe_router_enable_expert_bias:
        submodules.router = BiasedRouter


def _computed(
    scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, compute: Compute
) -> tuple[Tensor, Tensor]:
    """The answer of a ``RouterReplay`` that neither records nor replays."""
    return compute(scores, topk, num_groups, group_topk)


def adapt_narrow_experts(layer: Any, context: LayerContext) -> None:
    """Puts projections around the routed experts of a layer, if its config has an ``expert_latent_size``."""
    submodules = submodules_of(layer.mlp)
    if getattr(context.config, "expert_latent_size", None) is None or not hasattr(submodules, "router"):
        return
    require_no_overlap(context.config)
    submodules.experts = with_module(submodules.experts, functools.partial(mixed, NarrowExperts))
    layer.mlp = with_module(layer.mlp, functools.partial(mixed, NarrowLayer))


def require_no_overlap(config: TransformerConfig) -> None:
    """Raise ``ConfigError`` if shared experts run while tokens travel, from the input that travels."""
    if config.moe_shared_expert_overlap:
        raise ConfigError(
            "moe_shared_expert_overlap must be False, found True: shared experts read another input than the routed "
            "ones. Remove the override."
        )


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
