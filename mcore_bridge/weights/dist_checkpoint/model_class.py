"""Which of megatron-core's model classes has written a checkpoint, and its keys for a model of the other class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mcore_bridge.config.layer_kinds import inner_letters, letters_of
from mcore_bridge.rules.hybrid_keys import HalfKeys
from mcore_bridge.weights.hf_layers import is_hybrid, whole_config

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

_DECODER = "decoder."


def translation(config: TransformerConfig, *, own: bool, other: bool) -> Callable[[str], str]:
    """What gives a key of one class its spelling in another; ``own`` and ``other`` say which are ``HybridModel``."""
    if own == other:
        return lambda key: key
    keys, mtp = HalfKeys(letters_of(config)), HalfKeys((inner_letters(config),))
    change, of_mtp = (keys.to_hybrid, mtp.mtp_to_hybrid) if other else (keys.to_gpt, mtp.mtp_to_gpt)
    return lambda key: _DECODER + change(key.removeprefix(_DECODER)) if key.startswith(_DECODER) else of_mtp(key)


def respell(state: Mapping[str, Mapping[str, Any]], chunk: GPTModel, *, hybrid: bool) -> None:
    """Give the entries of sharded state dicts the keys of ``HybridModel``, or those of ``GPTModel``, in place.

    Args:
        state: of all chunks, from ``compare.sharded_states``.
        chunk: one of them.
        hybrid: whether the keys are to be those of ``HybridModel``.
    """
    spelled = translation(whole_config(chunk), own=is_hybrid(chunk), other=hybrid)
    for entries in state.values():
        for sharded in entries.values():
            sharded.key = spelled(sharded.key)
