"""Shared experts that the router scores like routed ones: the weights of both kinds together have the sum one.

A number of the checkpoint, and the scaling factor of the config, multiply all weights. The router gives the weights of
shared experts, so these run behind it, on the input of the layer.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    checkpoint,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.backend import LayerContext, mixed, submodules_of, with_module
from mcore_bridge.factory.modules.experts import require_no_overlap
from mcore_bridge.factory.modules.experts_beside import ones
from mcore_bridge.factory.modules.torch_modules import placement


def adapt_scored_sharing(layer: Any, context: LayerContext) -> None:
    """Let the router of a layer weigh its shared experts, if ``shared_experts_scored`` of the layer's config is set.

    A layer has as many shared experts as fit into ``moe_shared_expert_intermediate_size``. One without experts stays
    unchanged.
    """
    config, submodules = context.config, submodules_of(layer.mlp)
    if not getattr(config, "shared_experts_scored", False) or not hasattr(submodules, "router"):
        return
    require_no_overlap(config)
    if config.moe_shared_expert_intermediate_size is None:
        raise ConfigError(
            "n_shared_experts must be at least 1, found 0: transformers fails without shared experts here. Correct the "
            "HF config, or remove the override of moe_shared_expert_intermediate_size"
        )
    submodules.router = mixed(ScoringRouter, submodules.router)
    submodules.shared_experts = ModuleSpec(WeighedExperts)
    layer.mlp = with_module(layer.mlp, functools.partial(mixed, ScoredSharing))


class ScoringRouter(nn.Module):
    """A router with a row for each shared expert behind the rows of routed ones."""

    def __init__(self, config: Any, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        router: Any = self
        rows = config.num_moe_experts + config.moe_shared_expert_intermediate_size // config.moe_ffn_hidden_size
        router.weight = nn.Parameter(router.weight.new_empty(rows, config.hidden_size))
        router.reset_parameters()
        self.global_scale = ones(config, 1)
        self.of_shared: Tensor | None = None

    def routing(self, logits: Tensor, *mask: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Weights of routed experts ``[tokens, experts]`` and which are chosen, from logits of all ``[s, b, rows]``.

        ``of_shared`` gets the weights of shared experts ``[s, b, shared]``.
        """
        router: Any = super()
        config: Any = self.config
        routed, shared = logits.split((config.num_moe_experts, logits.size(-1) - config.num_moe_experts), -1)
        weights, chosen = router.routing(routed.contiguous(), *mask, **named)
        scores, of_shared = (part.float().sigmoid().flatten(0, -2) for part in (routed, shared))
        of_chosen = (scores * chosen).sum(-1, keepdim=True)
        share = self.global_scale.float() / (of_chosen + of_shared.sum(-1, keepdim=True))
        self.of_shared = (of_shared * share * (config.moe_router_topk_scaling_factor or 1.0)).view_as(shared)
        # megatron-core has divided the weights of several experts by their sum
        share = share * of_chosen if config.moe_router_topk > 1 else share
        return weights * share.to(weights.dtype), chosen


class WeighedExperts(MegatronModule):
    """Shared experts side by side, each with a weight for each token. Each TP rank has some rows of each expert.

    ``gate_up`` is ``[rows, shared, h]``: rows of all gates, then as many of what gates multiply. ``down`` is ``[shared,
    h, rows]``.
    """

    def __init__(self, config: Any, *, pg_collection: Any, **unused: Any) -> None:
        super().__init__(config)
        self.group, size = pg_collection.tp, config.moe_ffn_hidden_size // pg_collection.tp.size()
        count, hidden = config.moe_shared_expert_intermediate_size // config.moe_ffn_hidden_size, config.hidden_size
        self.gate_up = self._cut(0, config.init_method, 2 * size, count, hidden)
        self.down = self._cut(2, config.output_layer_init_method, count, hidden, size)

    def _cut(self, dim: int, initialise: Any, *sizes: int) -> nn.Parameter:
        """A parameter of which ranks hold parts along ``dim``. Each rank draws other values."""
        parameter: Any = nn.Parameter(torch.empty(*sizes, **placement(self.config)))
        if self.config.perform_initialization:
            with get_cuda_rng_tracker().fork():
                initialise(parameter)
        parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1
        result: nn.Parameter = parameter
        return result

    def forward(self, hidden_states: Tensor, weights: Tensor) -> Tensor:
        """``[s, b, h]``, from hidden states and weights ``[s, b, shared]`` of this TP rank's tokens."""
        tokens, whole = self._entering(hidden_states), self._entering(weights)
        flat, by_expert = tokens.flatten(0, 1), whole.flatten(0, 1).t().unsqueeze(-1)
        gate, up = (flat @ self.gate_up.permute(1, 2, 0)).chunk(2, -1)
        activated = self.config.activation_func(gate) * up
        output = ((activated * by_expert.to(flat.dtype)) @ self.down.mT).float().sum(0).to(flat.dtype)
        whole_output = output.view_as(tokens)
        if self.config.sequence_parallel:
            summed: Tensor = reduce_scatter_to_sequence_parallel_region(whole_output, group=self.group)
        else:
            summed = reduce_from_tensor_model_parallel_region(whole_output, group=self.group)
        return summed

    def _entering(self, own: Tensor) -> Tensor:
        """The tokens of all TP ranks. The backward sums the gradients of all ranks."""
        if self.config.sequence_parallel:
            gathered: Tensor = gather_from_sequence_parallel_region(own, group=self.group)
            return gathered
        copied: Tensor = copy_to_tensor_model_parallel_region(own, group=self.group)
        return copied

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """The parameters for a checkpoint of megatron-core."""
        cut = {name: parameter.partition_dim for name, parameter in self.named_parameters()}
        tensors: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True), prefix, cut, sharded_offsets
        )
        fused = f"{prefix}gate_up"
        return {**tensors, fused: apply_swiglu_sharded_factory(tensors[fused], sharded_offsets)}


class ScoredSharing(nn.Module):
    """megatron-core's layer of experts, whose shared experts run behind the router."""

    router: Any
    shared_experts: Any
    shared_experts_recompute: bool

    def shared_experts_compute(self, hidden_states: Tensor) -> Tensor:
        """The input ``[s, b, h]``, for later."""
        return hidden_states

    def postprocess(self, output: Tensor, shared_expert_output: Tensor) -> Tensor:
        """Add the shared experts of the input to the sum of the routed ones."""
        layer: Any = super()
        summed: Tensor = layer.postprocess(output, None)
        weights, self.router.of_shared = self.router.of_shared, None
        if self.shared_experts_recompute:
            shared: Tensor = checkpoint(self.shared_experts, False, shared_expert_output, weights)
        else:
            shared = self.shared_experts(shared_expert_output, weights)
        return summed + shared
