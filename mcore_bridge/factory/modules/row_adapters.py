"""The adapters of a layer of which each token uses one: the adapter of the set that belongs to its row of the batch.

The tokens of a layer are sorted by set, and for a layer with several experts also by expert. Then one grouped product
computes each factor of all sets, where torch has a kernel for it. Between the two products, the tokens of all sets are
together again, so that ranks communicate once for all sets, whatever tokens a rank has of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mcore_bridge.factory.modules.adapter import outputs_and_input, without_bias
from mcore_bridge.factory.modules.dispatched_tokens import DispatchedTokens
from mcore_bridge.factory.modules.grouped import Groups, SortedTokens, padded, product_of_groups

if TYPE_CHECKING:
    from mcore_bridge.batches.row_sets import TokenSets

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
        inner = self._inner(flat.index_select(0, own.places), own.groups)
        if not adapter.is_local:
            whole = inner.new_zeros(len(flat), inner.size(1)).index_copy(0, own.places, inner)
            whole = adapter.across(whole)
            own = self._sort(len(whole), self._numbers)
            inner = whole.index_select(0, own.places)
        base = product.flatten(0, -2)
        beside = self._outer(inner, own, layer, without_bias(layer, base, bias) if self._has_dora else base)
        return base.index_add(0, own.places, beside.to(base.dtype)).view_as(product), bias

    @property
    def _has_dora(self) -> bool:
        return any(adapters[0].magnitude is not None for adapters in self._of_sets)

    def _inner(self, rows: Tensor, groups: Groups) -> Tensor:
        """``A x`` for all parts, ``[sorted tokens, widest parts * rank]``, from the tokens of all sets."""
        stacks = [_stack(adapter.linear_in() for adapter in each) for each in self._of_sets]
        if not any(each[0].drops() for each in self._of_sets):
            firsts = [each[0].first(stack) for each, stack in zip(self._of_sets, stacks, strict=True)]
            return product_of_groups(rows, firsts, groups)
        of_sets = zip(self._of_sets, stacks, self._by_set(rows, groups), self._counts(groups), strict=True)
        inner = [
            each[0].inner(each[0].inputs_of(own), stack, Groups(counts).product) for each, stack, own, counts in of_sets
        ]
        return torch.cat([padded(own, 1, max(own.size(1) for own in inner)) for own in inner])

    def _outer(self, inner: Tensor, own: SortedTokens, layer: nn.Module, base: Tensor) -> Tensor:
        """What the adapters add to the product ``base`` of the layer, ``[sorted tokens, out]``."""
        seconds = [each[0].second(_stack(adapter.linear_out() for adapter in each)) for each in self._of_sets]
        beside = product_of_groups(inner, seconds, own.groups)[:, : base.size(1)]
        scales = [each[0].scale for each in self._of_sets]
        if len({*scales}) == 1 and not self._has_dora:
            return beside * scales[0]
        of_sets = zip(
            self._of_sets, self._by_set(beside, own.groups), self._by_set(own.places, own.groups), strict=True
        )
        changes = []
        for each, part, places in of_sets:
            change = part * each[0].scale
            if each[0].magnitude is not None:
                change = each[0].resized(layer.weight, base.index_select(0, places), change)
            changes.append(change)
        return torch.cat(changes)

    def _by_set(self, rows: Tensor, groups: Groups) -> Sequence[Tensor]:
        return rows.split([sum(counts) for counts in self._counts(groups)])

    def _counts(self, groups: Groups) -> list[list[int]]:
        """The numbers of tokens of the groups of each set: one group, or a group for each expert."""
        num_experts = len(self._of_sets[0])
        return [groups.counts[start : start + num_experts] for start in range(0, len(groups.counts), num_experts)]


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
        sort: Sorting = tokens.sort
        if experts:
            found = chunk.get_submodule(layer)
            expert = int(of_expert.split(".")[1]) if of_expert.startswith("local_experts.") else None
            sort = partial(routed.setdefault(found, DispatchedTokens(found, tokens)).sort, expert=expert)
        modules[path] = RowAdapters(adapters, sort)
    return modules, routed


def _stack(factors: Iterable[Tensor]) -> Tensor:
    """The factor of one layer, or the factors of all experts of a layer, ``[experts, ...]``."""
    each = [*factors]
    return torch.stack(each) if len(each) > 1 else each[0][None]
