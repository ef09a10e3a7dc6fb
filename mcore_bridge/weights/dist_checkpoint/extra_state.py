"""What TransformerEngine's modules keep beside tensors (``_extra_state``): nothing, but for fp8; yet they ask for it.

megatron-core's own linears say that they have one too, so that either kind loads what the other has saved. Its norms,
its attention and linears that are not cut say nothing: a model with TransformerEngine's could not load what they save.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

SUFFIX = "._extra_state"
_ATTENTION = (f".self_attention.linear_proj{SUFFIX}", f".self_attention.core_attention{SUFFIX}")
_WITHOUT = ("embedding.", "output_layer")
"""What has none, whoever builds it."""


def with_extra_states(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a chunk says that it holds, with an empty state for each module that may be asked for one.

    Their names are those of nothing in the chunk, which numbers its layers otherwise than keys do.
    """
    known = {sharded.key for sharded in state.values()}
    added = (each for sharded in state.values() for each in _extra_states(sharded))
    return {**state, **{f"added {each.key}": each for each in added if each.key not in known}}


def _extra_states(sharded: Any) -> Iterator[Any]:
    """The states that one thing which a chunk holds tells of."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    module, _, name = sharded.key.rpartition(".")
    if isinstance(sharded, ShardedObject) and sharded.key.endswith(_ATTENTION[0]):
        yield replace(sharded, key=sharded.key.replace(*_ATTENTION), data=None)
    is_whole = isinstance(sharded, ShardedTensor) and sharded.local_shape == sharded.global_shape
    if is_whole and name == "weight" and not module.endswith(".router") and not module.startswith(_WITHOUT):
        yield ShardedObject(module + SUFFIX, None, (1,), (0,), sharded.replica_id)
