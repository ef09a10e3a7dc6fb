"""The adapters of a layer of which each token uses one: the adapter of the set that belongs to its row of the batch.

The tokens of a layer are sorted by set, and for a layer with several experts also by expert. Then one grouped product
computes each factor of all sets, where torch has a kernel for it. Between the two products, the tokens of all sets are
together again, so that ranks communicate once for all sets, whatever tokens a rank has of each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from mcore_bridge.batches.row_sets import SortedTokens, TokenSets, sort_tokens
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.adapter import (
    TokenGroups,
    inner,
    outputs_and_input,
    padded,
    product_of_groups,
    without_bias,
)
from mcore_bridge.rules.names import TOWER

Stacks = Sequence[Tensor]
"""A factor of all groups of tokens, in order. Each tensor has some of the groups as first dim."""
Sorting = Callable[..., SortedTokens]
"""Sorts the tokens of a layer by set, and then by expert, given how many tokens the layer has, and the numbers of sets.

Other tokens are left out. With ``expert=``, the layer is of the expert at this place.
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
        self._of_sets: list[Any] = [*self]
        self._each: Sequence[tuple[Stacks, Stacks]] = ()

    def forward(self, layer: nn.Module, inputs: tuple[Any, ...], outputs: Any, expert: int | None = None) -> Any:
        """The outputs of ``layer`` with the adapters' added. A set without tokens takes part, too.

        Otherwise its parameters would have no gradient, and ranks with and without its tokens would wait for each
        other.

        Args:
            layer, inputs, outputs: the layer; of one expert, or of all.
            expert: the place of the expert; None: the layer is of none or of all.
        """
        (product, bias), hidden = outputs_and_input(outputs, inputs[0])
        flat, adapter = hidden.flatten(0, -2), self._of_sets[0]
        sort = self._sort if expert is None else partial(self._sort, expert=expert)
        firsts, seconds = self._stacks(expert)
        own = sort(len(flat), self._numbers)
        rows = own.take(flat)
        ins = self._inputs(rows, own)
        narrow, redone = self._inner(rows, ins, firsts, own), self._redone(layer, ins, own)
        if not adapter.is_local:
            whole = adapter.across(own.put(narrow))
            own = sort(len(whole), self._numbers)
            narrow = own.take(whole)
        base = product.flatten(0, -2)
        beside = product_of_groups(narrow, seconds, TokenGroups(own.counts, own.ends))[:, : base.size(1)]
        if self._has_dora or len({of_set.scale for of_set in self._of_sets}) > 1:
            plain = without_bias(layer, base, bias) if self._has_dora else base
            beside = self._scaled(beside, own, layer, plain, redone)
        else:
            beside = beside * adapter.scale
        return (base + own.put(beside.to(base.dtype))).view_as(product), bias

    def begin(self) -> None:
        """As for ``ExpertAdapters``, with the factors of all sets in one tensor for each expert, if they are alike."""
        firsts, seconds = zip(*(of_set.factors() for of_set in self._of_sets), strict=True)
        is_split = any(of_set.drops() for of_set in self._of_sets)
        self._each = [*zip(_by_expert(firsts, is_split=is_split), _by_expert(seconds), strict=True)]

    def end(self) -> None:
        """As for ``ExpertAdapters``."""
        self._each = ()

    def _stacks(self, expert: int | None) -> tuple[Stacks, Stacks]:
        """A and B of all sets for ``product_of_groups``."""
        if expert is not None and self._each:
            return self._each[expert]
        firsts, seconds = zip(*(of_set.stacks(expert) for of_set in self._of_sets), strict=True)
        return firsts, seconds

    @property
    def _has_dora(self) -> bool:
        return any(of_set.magnitude is not None for of_set in self._of_sets)

    def _inputs(self, rows: Tensor, own: SortedTokens) -> list[list[Tensor]]:
        """The inputs of A for the sorted tokens of each set: one for all parts, or with dropout one for each part."""
        return [of_set.inputs_of(part) for of_set, part in zip(self._of_sets, self._by_set(rows, own), strict=True)]

    def _inner(self, rows: Tensor, ins: list[list[Tensor]], firsts: Sequence[Tensor], own: SortedTokens) -> Tensor:
        """``A x`` for all parts, ``[sorted tokens, widest parts * rank]``, from the tokens of all sets.

        Args:
            firsts: A of each set, ``[1 or experts, parts * rank, in]``.
        """
        if not any(of_set.drops() for of_set in self._of_sets):
            return product_of_groups(rows, firsts, TokenGroups(own.counts, own.ends))
        of_sets = zip(ins, firsts, self._counts(own), strict=True)
        parts = [inner(dropped, first, TokenGroups(counts).product) for dropped, first, counts in of_sets]
        widest = max(part.size(1) for part in parts)
        return torch.cat([padded(part, 1, widest) for part in parts])

    def _redone(self, layer: nn.Module, ins: list[list[Tensor]], own: SortedTokens) -> list[Tensor]:
        """The products of the layer for inputs with dropout, one for each part, if a set of DoRA drops any.

        Each token belongs to one set. So one product for the first parts of all sets is enough, and so on.
        """
        if not any(of_set.magnitude is not None and of_set.drops() for of_set in self._of_sets):
            return []
        numbers = range(max(map(len, ins)))
        parts = [torch.cat([of_set[min(number, len(of_set) - 1)] for of_set in ins]) for number in numbers]
        return self._of_sets[0].products(layer.weight, [own.put(part) for part in parts])

    def _scaled(
        self, beside: Tensor, own: SortedTokens, layer: nn.Module, base: Tensor, redone: Sequence[Tensor]
    ) -> Tensor:
        """What the adapters add to the product ``base`` of the layer, ``[sorted tokens, out]``.

        Args:
            beside: ``B A x``, not yet scaled.
            redone: the result of ``_redone``, the base of DoRA with dropout.
        """
        of_sets = zip(self._of_sets, self._by_set(beside, own), self._by_set(own.places, own), strict=True)
        changes = []
        for of_set, part, places in of_sets:
            change = part * of_set.scale
            if of_set.magnitude is not None:
                outs = redone[: of_set.parts] if of_set.drops() else [base]
                changed = of_set.of_parts([out.index_select(0, places) for out in outs])
                change = of_set.resized(layer.weight, changed, change)
            changes.append(change)
        return torch.cat(changes)

    def _by_set(self, rows: Tensor, own: SortedTokens) -> Sequence[Tensor]:
        return rows.split([sum(counts) for counts in self._counts(own)])

    def _counts(self, own: SortedTokens) -> list[list[int]]:
        """The numbers of tokens of the groups of each set: one group, or a group for each expert."""
        num_groups = len(own.counts) // len(self._of_sets)
        return [own.counts[start : start + num_groups] for start in range(0, len(own.counts), num_groups)]


def _by_expert(factors: Stacks, *, is_split: bool = False) -> list[Stacks]:
    """For each expert the stacks of a factor of all sets, from a factor of all experts of each set.

    Args:
        is_split: whether each set needs a stack of its own.
    """
    kinds = {(factor.shape, factor.dtype) for factor in factors}
    if is_split or len(kinds) > 1:
        of_experts = zip(*(factor.unbind() for factor in factors), strict=True)
        return [[own[None] for own in of_sets] for of_sets in of_experts]
    return [[of_sets] for of_sets in torch.stack([*factors], 1).unbind()]


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

    def sort(self, num_tokens: int, sets: tuple[int, ...], *, expert: int | None = None) -> SortedTokens:
        """The tokens of one expert of this rank sorted by set, or of all experts sorted by set and then by expert.

        Args:
            num_tokens: how many tokens there are.
            sets: the numbers of the sets that have tokens; others are left out.
            expert: the place of the expert on this rank; None: all.
        """
        expected = sum(self._counts) if expert is None else self._counts[expert]
        if expected != num_tokens:
            raise ConfigError(
                f"experts with adapters must get {expected} tokens, as the dispatcher has sent, found {num_tokens}: "
                "their tokens have no known rows, so call forward for each set without adapters="
            )
        if (sets, expert) not in self._sorted:
            chosen, count = self._tokens.among(self._numbers, sets), len(self._counts)
            of_tokens = torch.arange(count).repeat_interleave(torch.tensor(self._counts)).to(chosen.device)
            if expert is None:
                groups = torch.where(chosen < 0, -1, chosen * count + of_tokens)
                self._sorted[sets, None] = sort_tokens(groups, len(sets) * count)
            else:
                self._sorted |= {
                    (sets, place): own for place, own in enumerate(self._each(chosen, of_tokens, len(sets)))
                }
        return self._sorted[sets, expert]

    def _each(self, chosen: Tensor, of_tokens: Tensor, num_sets: int) -> Iterator[SortedTokens]:
        """Yield the tokens of each expert sorted by set; one sort is enough for all experts.

        Args:
            chosen: the place of the set of each token; -1: none.
            of_tokens: the expert of each token, in order.
        """
        groups, starts = of_tokens * (num_sets + 1) + chosen + 1, torch.tensor([0, *accumulate(self._counts)][:-1])
        places = groups.argsort(stable=True) - starts.to(groups.device)[of_tokens]
        counts = groups.bincount(minlength=len(starts) * (num_sets + 1)).view(-1, num_sets + 1)
        ends = counts[:, 1:].cumsum(1, dtype=torch.int32)
        for own, (none, *of_sets), until in zip(places.split(self._counts), counts.tolist(), ends, strict=True):
            yield SortedTokens(own[none:], of_sets, until, len(own))


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
        layer, experts, _ = path.partition(".experts.")
        sort: Sorting = tokens.sort_in_tower if path.startswith(TOWER) else tokens.sort
        if experts:
            moe = chunk.get_submodule(layer)
            sort = routed.setdefault(moe, DispatchedTokens(moe, tokens)).sort
        modules[path] = RowAdapters(adapters, sort)
    return modules, routed
