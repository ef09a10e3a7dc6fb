"""The adapters of a layer of which each token uses one: the adapter of the set that belongs to its row of the batch.

The tokens of a layer are sorted by set, and for a layer with several experts also by expert. Then one grouped product
computes each factor of all sets, where torch has a kernel for it. Between the two products, the tokens of all sets are
together again, so that ranks communicate once for all sets, whatever tokens a rank has of each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mcore_bridge.batches.row_sets import SortedTokens, TokenSets, sort_tokens
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.adapter import TokenGroups, outputs_and_input, padded, product_of_groups, without_bias
from mcore_bridge.rules.names import TOWER

Sorting = Callable[[int, tuple[int, ...]], SortedTokens]
"""Sorts the tokens of a layer by set, and then by expert, given how many tokens the layer has, and the numbers of sets.

Other tokens are left out.
"""


class RowAdapters(nn.ModuleList):
    """The adapters of one layer of several sets, in the place of the adapter of one set.

    Args:
        adapters: the adapters by the number of their set. A set may have none in this layer.
        sort: sorts the tokens of the layer.
    """

    def __init__(self, adapters: Mapping[int, nn.Module], sort: Sorting) -> None:
        super().__init__(adapters.values())
        self._numbers, self._sort = tuple(adapters), sort
        self._of_sets = [[*module.by_weight.values()] for module in self]  # type: ignore[operator]

    def forward(self, layer: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> Any:
        """The outputs of ``layer`` with the adapters' added. A set without tokens takes part, too.

        Otherwise its parameters would have no gradient, and ranks with and without its tokens would wait for each
        other.
        """
        (product, bias), hidden = outputs_and_input(outputs, inputs[0])
        flat, adapter = hidden.flatten(0, -2), self._of_sets[0][0]
        own = self._sort(len(flat), self._numbers)
        rows = own.take(flat)
        ins = self._inputs(rows, own)
        inner, redone = self._inner(rows, ins, own), self._redone(layer, ins, own)
        if not adapter.is_local:
            whole = adapter.across(own.put(inner))
            own = self._sort(len(whole), self._numbers)
            inner = own.take(whole)
        base = product.flatten(0, -2)
        beside = self._outer(inner, own, layer, without_bias(layer, base, bias) if self._has_dora else base, redone)
        return (base + own.put(beside.to(base.dtype))).view_as(product), bias

    @property
    def _has_dora(self) -> bool:
        return any(adapters[0].magnitude is not None for adapters in self._of_sets)

    def _inputs(self, rows: Tensor, own: SortedTokens) -> list[list[Tensor]]:
        """The inputs of A for the sorted tokens of each set: one for all parts, or with dropout one for each part."""
        pairs = zip(self._of_sets, self._by_set(rows, own), strict=True)
        return [adapters[0].inputs_of(part) for adapters, part in pairs]

    def _inner(self, rows: Tensor, ins: list[list[Tensor]], own: SortedTokens) -> Tensor:
        """``A x`` for all parts, ``[sorted tokens, widest parts * rank]``, from the tokens of all sets."""
        stacks = [_stack(adapter.linear_in() for adapter in adapters) for adapters in self._of_sets]
        if not any(adapters[0].drops() for adapters in self._of_sets):
            firsts = [adapters[0].first(stack) for adapters, stack in zip(self._of_sets, stacks, strict=True)]
            return product_of_groups(rows, firsts, TokenGroups(own.counts, own.ends))
        of_sets = zip(self._of_sets, stacks, ins, self._counts(own), strict=True)
        inner = [
            adapters[0].inner(parts, stack, TokenGroups(counts).product) for adapters, stack, parts, counts in of_sets
        ]
        widest = max(part.size(1) for part in inner)
        return torch.cat([padded(part, 1, widest) for part in inner])

    def _redone(self, layer: nn.Module, ins: list[list[Tensor]], own: SortedTokens) -> list[Tensor]:
        """The products of the layer for inputs with dropout, one for each part, if a set of DoRA drops any.

        Each token belongs to one set. So one product for the first parts of all sets is enough, and so on.
        """
        pairs = zip(self._of_sets, ins, strict=True)
        if not any(adapters[0].magnitude is not None and adapters[0].drops() for adapters, _ in pairs):
            return []
        numbers = range(max(map(len, ins)))
        parts = [torch.cat([of_set[min(number, len(of_set) - 1)] for of_set in ins]) for number in numbers]
        return self._of_sets[0][0].products(layer.weight, [own.put(part) for part in parts])

    def _outer(
        self, inner: Tensor, own: SortedTokens, layer: nn.Module, base: Tensor, redone: Sequence[Tensor]
    ) -> Tensor:
        """What the adapters add to the product ``base`` of the layer, ``[sorted tokens, out]``.

        Args:
            redone: the result of ``_redone``, the base of DoRA with dropout.
        """
        seconds = [
            adapters[0].second(_stack(adapter.linear_out() for adapter in adapters)) for adapters in self._of_sets
        ]
        beside = product_of_groups(inner, seconds, TokenGroups(own.counts, own.ends))[:, : base.size(1)]
        scales = [adapters[0].scale for adapters in self._of_sets]
        if len({*scales}) == 1 and not self._has_dora:
            return beside * scales[0]
        of_sets = zip(self._of_sets, self._by_set(beside, own), self._by_set(own.places, own), strict=True)
        changes = []
        for adapters, part, places in of_sets:
            change = part * adapters[0].scale
            if adapters[0].magnitude is not None:
                outs = redone[: adapters[0].parts] if adapters[0].drops() else [base]
                changed = adapters[0].of_parts([out.index_select(0, places) for out in outs])
                change = adapters[0].resized(layer.weight, changed, change)
            changes.append(change)
        return torch.cat(changes)

    def _by_set(self, rows: Tensor, own: SortedTokens) -> Sequence[Tensor]:
        return rows.split([sum(counts) for counts in self._counts(own)])

    def _counts(self, own: SortedTokens) -> list[list[int]]:
        """The numbers of tokens of the groups of each set: one group, or a group for each expert."""
        num_experts = len(self._of_sets[0])
        return [own.counts[start : start + num_experts] for start in range(0, len(own.counts), num_experts)]


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


def adapters_by_row(
    chunk: nn.Module, sets: Sequence[Mapping[str, nn.Module]], tokens: TokenSets
) -> tuple[dict[str, nn.Module], dict[Any, DispatchedTokens]]:
    """The adapters of several sets, one module for each layer that has any.

    Args:
        chunk: the chunk that has these sets.
        sets: for each set its adapters by the path of their layer.
        tokens: the tokens of each set.

    Returns:
        These modules by the path of their layer, and what follows the tokens of each of megatron-core's layers of
        experts: a hook of the router.
    """
    of_layers: dict[str, dict[int, nn.Module]] = {}
    for number, of_set in enumerate(sets):
        for path, adapter in of_set.items():
            of_layers.setdefault(path, {})[number] = adapter
    modules: dict[str, nn.Module] = {}
    routed: dict[Any, DispatchedTokens] = {}
    for path, adapters in of_layers.items():
        layer, experts, of_expert = path.partition(".experts.")
        sort: Sorting = tokens.sort_in_tower if path.startswith(TOWER) else tokens.sort
        if experts:
            moe = chunk.get_submodule(layer)
            expert = int(of_expert.split(".")[1]) if of_expert.startswith("local_experts.") else None
            sort = partial(routed.setdefault(moe, DispatchedTokens(moe, tokens)).sort, expert=expert)
        modules[path] = RowAdapters(adapters, sort)
    return modules, routed


def _stack(factors: Iterable[Tensor]) -> Tensor:
    """The factor of one layer, or the factors of all experts of a layer, ``[experts, ...]``."""
    of_experts = [*factors]
    return torch.stack(of_experts) if len(of_experts) > 1 else of_experts[0][None]
