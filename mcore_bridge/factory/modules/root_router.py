"""Routers whose scores are roots of softplus, and routers that take the experts of a token from a table.

megatron-core has such scores from 0.19 on, and no tables. Here its softmax of the chosen logits gives the weights: of
logs of scores it is each score, divided by their sum. So its loss that balances experts counts a softmax of all logits,
as in transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mcore_bridge.errors import CheckpointError, ConfigError
from mcore_bridge.factory.modules.backend import (
    LayerContext,
    free_after_forward,
    mixed,
    read_tokens,
    require_tokens,
    submodules_of,
)
from mcore_bridge.factory.modules.experts import BiasedRouter, Router

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from mcore_bridge.factory.modules.experts import Compute


def adapt_root_scores(layer: Any, context: LayerContext) -> None:
    """Replace the router of a layer, if its scores are roots of softplus."""
    if not getattr(context.config, "root_scores", False):
        return
    _require_tokens(context.config)
    router = Router if context.backend == "torch" else BiasedRouter
    kind = TableRouter if getattr(context.config, "experts_by_token", False) else Roots
    submodules_of(layer.mlp).router = mixed(kind, router)


def _require_tokens(config: Any) -> None:
    """Raise ``ConfigError`` if a layer that chooses experts by tokens would be recomputed with later tokens."""
    granularity, modules = config.recompute_granularity, config.recompute_modules or ()
    recomputed = granularity == "full" or (granularity == "selective" and "moe" in modules)
    if getattr(config, "experts_by_token", False) and recomputed:
        raise ConfigError(
            f"experts must not be recomputed in this model, found recompute_granularity={granularity!r}, "
            f"recompute_modules={[*modules]}: the first layers choose experts by tokens, and a recompute would find "
            "tokens of a later microbatch. Recompute other modules, such as 'core_attn'"
        )


def give_tokens(chunk: GPTModel) -> None:
    """Let the embedding of a chunk give its tokens to routers with tables, and free them at the end of a forward.

    Behind the decoder, MTP layers embed later tokens.
    """
    routers = [module for module in chunk.decoder.modules() if isinstance(module, TableRouter)]
    if not routers:
        return

    def give(tokens: Tensor, embedded: Tensor) -> None:
        for router in routers:
            router.tokens = tokens

    read_tokens(chunk, give)
    free_after_forward(chunk, routers, tokens=None)


class Roots(nn.Module):
    """A router with the roots of softplus as scores. The bias only changes the choice of experts."""

    config: Any
    expert_bias: Any

    def _chosen(
        self, ask: Compute, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, compute: Compute
    ) -> tuple[Tensor, Tensor]:
        """The logs of scores, and the indices, of the chosen experts ``[tokens, topk]``, from logits."""
        logs = nn.functional.softplus(scores.float()).log() / 2
        _, experts = ask(self._ranked(logs.exp()), topk, num_groups, group_topk, compute)
        return logs.gather(1, experts), experts

    def _ranked(self, scores: Tensor) -> Tensor:
        """Numbers ``[tokens, experts]``, of which the highest are chosen."""
        ranked: Tensor = scores + self.expert_bias
        return ranked


class TableRouter(Roots):
    """A router that takes the experts of each token from a table of the checkpoint, and only weighs them."""

    tokens: Tensor | None = None
    experts_of_tokens: Tensor
    tp_group: Any

    def __init__(self, config: Any, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        # megatron-core updates it as it updates the biases of other layers, and no choice depends on it
        bias = self._buffers.pop("expert_bias")
        assert bias is not None
        self.register_buffer("expert_bias", bias, persistent=False)
        first = torch.arange(config.hf_vocab_size, device=bias.device)[:, None] * config.moe_router_topk
        table = (first + torch.arange(config.moe_router_topk, device=first.device)) % config.num_moe_experts
        self.register_buffer("experts_of_tokens", table)
        self.checked = -1

    def _ranked(self, scores: Tensor) -> Tensor:
        tokens = require_tokens(self.tokens, "the first layers choose experts by tokens").t()
        self._check()
        if self.config.sequence_parallel:
            tokens = tokens.chunk(self.config.tensor_model_parallel_size)[self.tp_group.rank()]
        return torch.zeros_like(scores).scatter_(1, self.experts_of_tokens[tokens.reshape(-1)], 1.0)

    def _check(self) -> None:
        """Raise ``CheckpointError`` for a token that the table gives one expert twice, once for each content."""
        table = self.experts_of_tokens
        if self.checked == table._version:
            return
        ordered, count = table.sort(-1).values, self.config.num_moe_experts
        is_wrong = (ordered.diff(dim=-1) == 0).any() | (ordered[:, 0] < 0).any() | (ordered[:, -1] >= count).any()
        if bool(is_wrong):
            raise CheckpointError(
                f"a table of experts (tid2eid) must give each token {table.size(1)} different experts below "
                f"{count}, and a row has others: load the table of the checkpoint"
            )
        self.checked = table._version
