"""The shards of adapters in megatron-core's checkpoints: each factor is cut along one dim, like its weight.

A linear layer of megatron-core treats parameters that it does not define as replicas. So without this module, the
``linear_out`` of a layer that is cut by rows would be saved from one rank only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from mcore_bridge.errors import CheckpointError
from mcore_bridge.rules.adapters import Adapters, is_adapter
from mcore_bridge.weights.model_tensors import adapted, entries_of, held_tensors

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

ADAPTERS = "mcore_bridge_adapters"
"""The key in a checkpoint that describes its adapters."""
Part = Literal["everything", "base", "adapters"]
"""The part of a model with adapters that is written or read."""


def require_part(part: str, chunk: GPTModel) -> None:
    """Raise ``CheckpointError`` if ``part`` is invalid, or the model does not have this part."""
    if part not in get_args(Part):
        raise CheckpointError(f"part must be one of {list(get_args(Part))}, found {part!r}: pass one of them")
    if part == "adapters" and not hasattr(chunk, "bridge_adapters"):
        raise CheckpointError('part="adapters" needs a model with adapters, found none: call add_adapters first')


def is_in(part: Part, key: str) -> bool:
    """Whether a tensor belongs to a part of its model, by its canonical name or its key."""
    return part == "everything" or is_adapter(key) == (part == "adapters")


def description(adapters: Adapters) -> dict[str, Any]:
    """The properties of adapters that a reader must share, and that shapes do not show."""
    return {
        "rank": adapters.rank,
        "alpha": float(adapters.alpha),
        "kind": adapters.kind,
        "modules": {rule.mcore: list(rule.hf) for rule in adapters.mapping.rules},
    }


def require_same(saved: Mapping[str, Any] | None, adapters: Adapters) -> None:
    """Raise ``CheckpointError`` if a checkpoint describes other adapters than the model has.

    Only modules of this rank's chunks count. ``targets`` may name more modules than a model has, and a folder of its
    adapters does not name them.

    Args:
        saved: the description in the checkpoint; None if there is none.
    """
    if saved is None:
        return
    held = {adapters.mapping.rule_of(name).mcore for name in adapters.names}
    ours, theirs = description(adapters), {**saved, **saved["modules"]}
    ours |= {module: hf for module, hf in ours.pop("modules").items() if module in held}
    different = [
        f"{key} {theirs.get(key)} there and {own} here" for key, own in sorted(ours.items()) if theirs.get(key) != own
    ]
    if different:
        raise CheckpointError(
            f"the checkpoint has other adapters than the model: {'; '.join(different[:8])}. Call add_adapters with the "
            "arguments of the run that wrote it"
        )


def sharded_state_dict(
    chunk: GPTModel, inner: Callable[..., Any] | None, prefix: str = "", *arguments: Any, **named: Any
) -> dict[str, Any]:
    """Replaces the method of a chunk, so that trainers that call it get the right entries for adapters, too.

    Args:
        inner: what replaced the method before; None: nothing did.
    """
    own = partial(type(chunk).sharded_state_dict, chunk) if inner is None else inner
    state: dict[str, Any] = own(prefix, *arguments, **named)
    _place_adapters(chunk, state, prefix)
    return state


def _place_adapters(chunk: GPTModel, state: dict[str, Any], prefix: str) -> None:
    """Put the entries of all adapters into the sharded state dict of a chunk, and replace existing ones."""
    entries = {id(sharded.data): sharded for sharded in state.values()}
    names = {id(parameter): f"{prefix}{name}" for name, parameter in chunk.named_parameters()}
    weights = held_tensors([chunk])
    for own, adapter in adapted(chunk):
        bases: list[Any] = [entries.get(id(weights[name])) for name in own]
        for end, factor, dim in adapter.tensors if all(bases) else ():  # a missing base is reported later
            keys = [f"{base.key.removesuffix('.weight')}.adapter.{end}.weight" for base in bases]
            parts = entries_of(factor) if adapter.expert else [factor]
            placed = [_placed(*one, dim, adapter.group.rank()) for one in zip(keys, parts, bases, strict=True)]
            state[names[id(factor)]] = _stacked(factor, placed, dim) if adapter.expert else placed[0]


def _stacked(factor: Tensor, entries: list[Any], dim: int) -> Any:
    """The entry of a factor ``[experts, ...]``, in whose place a checkpoint has the entries of all experts.

    Args:
        dim: the dim along which megatron-core splits a weight of an expert, if it does.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    of_each = [[entry] if not hasattr(entry, "build") else entry.build() for entry in entries]
    own, count = entries[0].key, len(of_each[0])
    characters = zip(own, *(leaf.key for leaves in of_each for leaf in leaves), strict=False)
    # Keys are alike up to the number of the expert, if they have one.
    alike = sum(1 for _ in takewhile(lambda at_place: len({*at_place}) == 1, characters))

    @torch.no_grad()
    def build(key: str, tensor: Tensor, replica_id: Any, flattened_range: slice | None) -> list[Any]:
        built, before = [], key.removesuffix(own[alike:])  # the key may be changed: respelled, or of an optimizer
        for leaves, entry in zip(of_each, tensor.unbind(), strict=True):
            parts = entry.split([leaf.local_shape[dim] for leaf in leaves], dim) if count > 1 else [entry]
            named = zip(leaves, parts, strict=True)
            options = {"dtype": tensor.dtype, "replica_id": replica_id}
            built += [replace(leaf, key=before + leaf.key[alike:], data=part, **options) for leaf, part in named]
        return built

    def merge(parts: list[Tensor]) -> Tensor:
        of_experts = [parts[start : start + count] for start in range(0, len(parts), count)]
        return torch.stack([torch.cat(own, dim) for own in of_experts])

    return ShardedTensorFactory(own, factor, build, merge, entries[0].replica_id)


def _placed(key: str, factor: Tensor, base: Any, dim: int, rank: int) -> Any:
    """The entry of a factor, which has ``dim`` in common with the weight of the entry ``base``.

    Args:
        rank: this rank among the ranks that cut the weight.
    """
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    leaves = [base] if isinstance(base, ShardedTensor) else base.build()
    ahead, length = leaves[0].prepend_axis_num, base.data.shape[dim]
    if all((leaf.local_shape[dim], leaf.global_shape[ahead + dim]) == (length, length) for leaf in leaves):
        is_cut = any(leaf.local_shape != leaf.global_shape[ahead:] for leaf in leaves)
        stage, replica, data_parallel = base.replica_id
        return _like(leaves[0], key, factor, None, (stage, rank if is_cut else replica, data_parallel))
    if isinstance(base, ShardedTensor):
        return _like(base, key, factor, dim, base.replica_id)

    # read keys now, since megatron-core may rename them before ``build``
    ends = [leaf.key.removeprefix(base.key) for leaf in leaves]

    @torch.no_grad()
    def build(key: str, tensor: Tensor, replica_id: Any, flattened_range: slice | None) -> list[Any]:
        parts = tensor.split([leaf.local_shape[dim] for leaf in leaves], dim)
        keys = (key + end for end in ends)
        return [_like(*own, dim, replica_id) for own in zip(leaves, keys, parts, strict=True)]

    def merge(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, dim)

    return ShardedTensorFactory(key, factor, build, merge, base.replica_id)


def _like(leaf: Any, key: str, tensor: Tensor, dim: int | None, replica_id: Any) -> Any:
    """The entry for ``tensor``, which is cut along ``dim`` like the tensor of ``leaf``, and whole along others."""
    ahead, shape = leaf.prepend_axis_num, list(tensor.shape)
    offset, count = [0] * tensor.dim(), [1] * tensor.dim()
    if dim is not None:
        places = (leaf.global_shape, leaf.global_offset, leaf.axis_fragmentations)
        shape[dim], offset[dim], count[dim] = (place[ahead + dim] for place in places)
    return replace(
        leaf,
        key=key,
        data=tensor,
        dtype=tensor.dtype,
        local_shape=tuple(tensor.shape),
        global_shape=(*leaf.global_shape[:ahead], *shape),
        global_offset=(*leaf.global_offset[:ahead], *offset),
        axis_fragmentations=(*leaf.axis_fragmentations[:ahead], *count),
        replica_id=replica_id,
    )
