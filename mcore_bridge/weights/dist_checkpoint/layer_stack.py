"""What a model says of its layers, for folders in which those of all layers lie in one tensor, by a leading axis.

megatron-core says it so by itself of dense models, where it is asked to; here it is made of what it says of each layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mcore_bridge.weights.dist_checkpoint.folder import in_layer_stack


def stack_layers(state: dict[str, Any], num_layers: int) -> None:
    """Turn, in place, what a chunk says of each layer into what it is of the tensors for all ``num_layers``."""
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
        if shape == (1,):  # what is not cut at all
            shape = offset = ()
        return replace(sharded, global_shape=(num_layers, *shape), global_offset=(layer, *offset))

    def build(*arguments: Any) -> Any:  # of the parameter, or of an optimizer's state of it
        return dict_list_map_inplace(lambda each: _in_stack(each, layer, num_layers), sharded.build_fn(*arguments))

    return replace(sharded, build_fn=build)
