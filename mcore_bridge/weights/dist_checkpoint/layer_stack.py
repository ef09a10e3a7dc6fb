"""Sharded state dicts for folders in which one tensor stacks all layers, along a leading dim.

On request megatron-core makes such state dicts for dense models. This module makes them for any model, from entries of
single layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mcore_bridge.weights.dist_checkpoint.folder import in_layer_stack


def stack_layers(state: dict[str, Any], num_layers: int) -> None:
    """Change the entries for single layers in ``state`` to slices of tensors that stack ``num_layers`` layers."""
    for name, sharded in state.items():
        key, layer = in_layer_stack(sharded.key)
        if layer is not None:
            state[name] = _in_stack(replace(sharded, key=key), layer, num_layers)


def _in_stack(sharded: Any, layer: int, num_layers: int) -> Any:
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    shape, offset = getattr(sharded, "global_shape", ()), getattr(sharded, "global_offset", ())
    if isinstance(sharded, ShardedTensor):
        return replace(
            sharded,
            global_shape=(num_layers, *shape),
            global_offset=(layer, *offset),
            axis_fragmentations=(num_layers, *(sharded.axis_fragmentations or ())),
            prepend_axis_num=sharded.prepend_axis_num + 1,
        )
    if isinstance(sharded, ShardedObject):
        if shape == (1,):  # an object that is not cut
            shape = offset = ()
        return replace(sharded, global_shape=(num_layers, *shape), global_offset=(layer, *offset))

    def build(*arguments: Any) -> Any:  # for the parameter, or for its state in an optimizer
        return dict_list_map_inplace(lambda part: _in_stack(part, layer, num_layers), sharded.build_fn(*arguments))

    return replace(sharded, build_fn=build)
