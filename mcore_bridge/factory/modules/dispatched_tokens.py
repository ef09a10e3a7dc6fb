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
        self._numbers, self._counts = torch.empty(0, dtype=torch.int64), [0]
        self._sorted: dict[object, SortedTokens] = {}

    @torch.no_grad()
    def follow(self, router: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
        """A forward hook of the router, whose input is ``[seq, batch, hidden]``. Ranks that share experts join."""
        (probs, routing_map), shape = outputs[:2], inputs[0].shape[:-1]
        dispatcher = copy.copy(self._layer.token_dispatcher)
        numbers = self._tokens.numbers(shape.numel()).float().view(*shape, 1) + 1  # fused permutations take floats
        sent = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(numbers, routing_map, probs))
        received, counts, _ = dispatcher.dispatch_postprocess(*sent)
        self.take(received[:, 0].long() - 1, torch.as_tensor(counts).tolist())

    def take(self, numbers: Tensor, counts: list[int]) -> None:
        """Hold the number of the set of each token, int64 ``[tokens]`` in the order of experts; -1: no set.

        Args:
            numbers: for the tokens of all experts of this rank.
            counts: how many tokens each expert has.
        """
        self._numbers, self._counts, self._sorted = numbers, counts, {}

    def sort(self, num_tokens: int, sets: tuple[int, ...], *, expert: int | None) -> SortedTokens:
        """The tokens of one expert of this rank sorted by set, or of all experts sorted by set and then by expert.

        Args:
            num_tokens: how many tokens there are.
            sets: the numbers of the sets that have tokens; others are left out.
            expert: the place of the expert on this rank; None: all.
        """
        experts = slice(None) if expert is None else slice(expert, expert + 1)
        counts, start = self._counts[experts], sum(self._counts[: experts.start or 0])
        if sum(counts) != num_tokens:
            raise ConfigError(
                f"experts with adapters must get {sum(counts)} tokens, as the dispatcher has sent, found {num_tokens}: "
                "their tokens have no known rows, so call forward for each set without adapters="
            )
        if (sets, expert) not in self._sorted:
            chosen = self._tokens.among(self._numbers[start : start + num_tokens], sets)
            places = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(chosen.device)
            groups = torch.where(chosen < 0, -1, chosen * len(counts) + places)
            self._sorted[sets, expert] = sort_tokens(groups, len(sets) * len(counts))
        return self._sorted[sets, expert]
