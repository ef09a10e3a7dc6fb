"""Planted mistakes in families with other places of norms, capped scores, and a different rope in each layer."""

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

import mcore_bridge as mb
from mcore_bridge.config.fields import Const
from mcore_bridge.config.rope import Rope
from mcore_bridge.config.tables.derived_rope import AlphaRope, ReversedRope
from mcore_bridge.factory.modules import gate_limits, layer_rope, norms, scores, torch_modules
from mcore_bridge.factory.modules import multipliers as scales
from tests.rules.mistakes.plain import entries
from tests.support import stepping
from tests.support.bounds import FOUR, ONE
from tests.support.bounds import TWO as SP
from tests.support.mutants import exchange, instead, itself, nothing
from tests.support.norm_cases import CASES


def norm_before_bias(module: Any, inputs: object, outputs: tuple[Any, Any]) -> Any:
    output, bias = outputs
    return module.post_layernorm(output), bias


def heads_of_the_first_rank(self: Any, hidden: torch.Tensor, mean_square: torch.Tensor, weight: torch.Tensor) -> Any:
    weight = self.weight.view(self.num_heads, self.head_dim)[: hidden.size(-2)]
    return norms.Norm.scaled(self, hidden, mean_square, weight)


def shared_heads_counted_again(self: Any, hidden: torch.Tensor, mean_square: torch.Tensor, weight: Any) -> Any:
    times = hidden.size(-2) * torch.distributed.get_world_size() / self.num_heads
    return norms.Norm.scaled(self, hidden, mean_square * times, weight)


def unnormed(self: Any, *tensors: Any, **options: Any) -> Any:
    return super(norms.NormAfterRope, self).forward(*tensors, **options)


def without_alpha(self: AlphaRope, seq_len: int | None) -> Any:
    parameters = {"rope_type": "default", "rope_theta": self.theta}
    return Rope(parameters=parameters, head_dim=self.head_dim, max_position_embeddings=64)._computed(None)


def stack_the_other_way(both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.cat([each[None] for each in reversed(both)])


def of_squares(hidden: torch.Tensor, sizes: object, eps: float) -> torch.Tensor:
    """As an RMSNorm."""
    return hidden * (hidden.square().mean(-1, keepdim=True) + eps).rsqrt()


def unmarked() -> AbstractContextManager[Any]:
    """Post norms that are not marked as computed from a part of the tokens."""
    true = norms.PostNorm.__init__

    def mistaken(self: Any, *sizes: int, **arguments: Any) -> None:
        true(self, *sizes, **arguments)
        self.post_layernorm.weight.sequence_parallel = False

    return mock.patch.object(norms.PostNorm, "__init__", mistaken)


def unsummed() -> AbstractContextManager[Any]:
    """Gradients finalized as if there were no norms of queries and keys."""
    true = stepping.forward_backward

    def mistaken(models: Any, *arguments: Any, **options: Any) -> Any:
        models[0].config.qk_layernorm = models[0].module.config.qk_layernorm = False
        return true(models, *arguments, **options)

    return mock.patch.object(stepping, "forward_backward", mistaken)


TP = mb.ParallelDims(tp=2)
PROJ, FC2 = "linear_proj.post_layernorm.weight", "linear_fc2.post_layernorm.weight"
RULES = {
    "post norms exchanged": ("logits", "olmo2", exchange(PROJ, FC2)),
    "pre norm for post norm": ("logits", "gemma2", exchange(".input_layernorm.weight", PROJ)),
}
MODULES = {
    "sum over the heads of the rank": ("olmo2", SP, instead(norms, "reduce_from_tensor_model_parallel_region", itself)),
    "weights of the first heads": ("olmo2", SP, instead(norms.AllHeadsNorm, "scaled", heads_of_the_first_rank)),
    "shared key heads counted again": ("olmo2", FOUR, instead(norms.KeyNorm, "scaled", shared_heads_counted_again)),
    "norm before the bias": ("olmo2-bias-tied", ONE, instead(norms, "_norm_output", norm_before_bias)),
    "scores not capped": ("gemma2", ONE, instead(scores.ScoresCoreAttention, "_attend", scores.CoreAttention._attend)),
    "logits not capped": ("gemma2", ONE, instead(scales, "cap_logits", nothing)),
    "embedding not scaled": ("gemma", ONE, instead(scales, "scale_embedding", nothing)),
    "one rope for all layers": ("gemma3", ONE, instead(layer_rope, "_SLIDING", layer_rope._FULL)),
    "ropes exchanged": ("gemma3-linear", ONE, instead(layer_rope.torch, "stack", stack_the_other_way)),
    "one attention factor": ("olmo3-yarn-bias", ONE, instead(layer_rope, "_with_attention_factor", itself)),
    "no norm behind the rope": ("hunyuan", ONE, instead(norms.NormAfterRope, "forward", unnormed)),
    "no bound of queries, keys and values": ("olmo", ONE, instead(gate_limits, "_clip", nothing)),
    "norms of squares alone": ("olmo", ONE, instead(torch_modules.nn.functional, "layer_norm", of_squares)),
    "a rope that turns as others": ("nanochat", ONE, instead(ReversedRope, "_computed", Rope._computed)),
    "no norm of embeddings": ("nanochat", ONE, lambda: entries("nanochat", Const("embedding_norm", None))),
    "alpha forgotten": ("hunyuan", ONE, instead(AlphaRope, "_computed", without_alpha)),
}
GRADIENTS = {
    "sum over heads not on the way back": (
        CASES["olmo2"],
        TP,
        instead(norms, "copy_to_tensor_model_parallel_region", itself),
    ),
    "post norm without its mark": (CASES["gemma2"], SP, unmarked),
    "norms of all heads not summed": (CASES["olmo2"], TP, unsummed),
    "norms behind the rope not summed": (CASES["hunyuan"], TP, unsummed),
}
