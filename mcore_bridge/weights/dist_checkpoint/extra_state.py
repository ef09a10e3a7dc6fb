"""The extra states of TransformerEngine's modules (``_extra_state``): empty without fp8, but required by each load.

megatron-core's linear layers have an extra state, too, so they can read each other's saves. megatron-core's norms,
attention and uncut linear layers have none. So without this module, a model with TransformerEngine's modules could not
load a save of a model with megatron-core's.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from mcore_bridge.rules.adapters import is_adapter

SUFFIX = "._extra_state"
_ATTENTION = (f".self_attention.linear_proj{SUFFIX}", f".self_attention.core_attention{SUFFIX}")
_WITHOUT = ("embedding.", "output_layer")
"""Modules that have no extra state in any backend."""
ExtraState = Literal["none", "tensor_pickle_none", "tensor_0_dim"] | None
"""The value of an empty extra state in a rank file, which depends on TransformerEngine's release; None omits it."""
EXTRA_STATES = (None, "none", "tensor_pickle_none", "tensor_0_dim")


def with_extra_states(state: Mapping[str, Any]) -> dict[str, Any]:
    """The sharded state dict of a chunk, with an empty extra state for each module that may require one.

    The added names are keys of the folder, and not names in the chunk, which numbers its layers differently.
    """
    known = {sharded.key for sharded in state.values()}
    extra = (added for sharded in state.values() for added in _extra_states(sharded))
    return {**state, **{f"added {added.key}": added for added in extra if added.key not in known}}


def _extra_states(sharded: Any) -> Iterator[Any]:
    """The extra states that follow from one entry of a sharded state dict."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    module, _, name = sharded.key.rpartition(".")
    if isinstance(sharded, ShardedObject) and sharded.key.endswith(_ATTENTION[0]):
        yield replace(sharded, key=sharded.key.replace(*_ATTENTION), data=None)
    is_whole = isinstance(sharded, ShardedTensor) and sharded.local_shape == sharded.global_shape
    has_none = module.endswith(".router") or module.startswith(_WITHOUT) or is_adapter(sharded.key)
    if is_whole and name == "weight" and not has_none:
        yield ShardedObject(module + SUFFIX, None, (1,), (0,), sharded.replica_id)


def fillers(state: Mapping[str, object], extra_state: ExtraState) -> dict[str, Tensor | None]:
    """Empty extra states for a chunk in a rank file, by name: for all modules of the decoder except routers."""
    if extra_state is None:
        return {}
    ends = (".weight", ".bias", ".weight0")
    modules = (name.rpartition(".")[0] for name in state if name.startswith("decoder.") and name.endswith(ends))
    return {
        f"{module}{SUFFIX}": _filler(extra_state) for module in dict.fromkeys(modules) if not module.endswith(".router")
    }


def _filler(extra_state: ExtraState) -> Tensor | None:
    if extra_state == "none":
        return None
    if extra_state == "tensor_0_dim":
        return torch.tensor([])
    return torch.frombuffer(bytearray(pickle.dumps(None)), dtype=torch.uint8)
