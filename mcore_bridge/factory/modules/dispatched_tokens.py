"""The sets of adapters of the tokens that reach the experts of a layer, whatever dispatcher permutes and sends them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.grouped import SortedTokens, sort_tokens

if TYPE_CHECKING:
    from mcore_bridge.batches.row_sets import TokenSets


class DispatchedTokens:
    """The number of the set of each token that this rank's experts of one layer get.

    After the router has chosen, a copy of the layer's dispatcher sends the numbers in place of hidden states, to the
    same experts and in the same order. A recompute runs the router again, and so sends the numbers again.

    Args:
        layer: megatron-core's layer of experts.
        tokens: the sets of the tokens that enter the layer.
    """

    def __init__(self, layer: Any, tokens: TokenSets) -> None:
        self._layer, self._tokens = layer, tokens
        self._of_experts: list[Tensor] = []
        self._sorted: dict[object, SortedTokens] = {}

    @torch.no_grad()
    def follow(self, router: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
        """A forward hook of the router, whose input is ``[seq, batch, hidden]``. Ranks that share experts join."""
        (probs, routing_map), shape = outputs[:2], inputs[0].shape[:-1]
        dispatcher = copy.copy(self._layer.token_dispatcher)
        numbers = self._tokens.numbers(shape.numel()).float().view(*shape, 1) + 1  # fused permutations take floats
        sent = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(numbers, routing_map, probs))
        received, counts, _ = dispatcher.dispatch_postprocess(*sent)
        self._of_experts = [*(received[:, 0].long() - 1).split([int(count) for count in counts])]
        self._sorted = {}

    def sort(self, num_tokens: int, sets: tuple[int, ...], *, expert: int | None) -> SortedTokens:
        """The tokens of one expert of this rank sorted by set, or of all experts sorted by set and then by expert.

        Args:
            num_tokens: how many tokens there are.
            sets: the numbers of the sets that have tokens; others are left out.
            expert: the place of the expert on this rank; None: all.
        """
        numbers = self._of_experts if expert is None else [self._of_experts[expert]]
        if (found := sum(map(len, numbers))) != num_tokens:
            raise ConfigError(
                f"experts with adapters must get {found} tokens, as the dispatcher has sent, found {num_tokens}: their "
                "tokens have no known rows, so call forward for each set without adapters="
            )
        if (sets, expert) not in self._sorted:
            chosen = [self._tokens.among(own, sets) for own in numbers]
            groups = [torch.where(own < 0, -1, own * len(chosen) + place) for place, own in enumerate(chosen)]
            self._sorted[sets, expert] = sort_tokens(torch.cat(groups), len(sets) * len(chosen))
        return self._sorted[sets, expert]
