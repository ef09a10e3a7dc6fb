"""Which of megatron-core's model classes has written a checkpoint, and its keys for a model of the other class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mcore_bridge.config.hybrid_layers import letters_of
from mcore_bridge.config.mtp import inner_letters
from mcore_bridge.rules.hybrid_keys import HalfKeys
from mcore_bridge.weights.hf_layers import is_hybrid, whole_config

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

_DECODER = "decoder."


def translation(config: TransformerConfig, *, own: bool, other: bool) -> Callable[[str], str]:
    """A function that translates keys of one class to another; ``own``, ``other``: whether it is ``HybridModel``."""
    if own == other:
        return lambda key: key
    keys, mtp = HalfKeys(letters_of(config)), HalfKeys((inner_letters(config),))
    change, of_mtp = (keys.to_hybrid, mtp.mtp_to_hybrid) if other else (keys.to_gpt, mtp.mtp_to_gpt)
    return lambda key: _DECODER + change(key.removeprefix(_DECODER)) if key.startswith(_DECODER) else of_mtp(key)


def respell(state: Mapping[str, Mapping[str, Any]], chunk: GPTModel, *, hybrid: bool) -> None:
    """Change the keys of sharded state dicts to the keys of ``HybridModel`` or of ``GPTModel``, in place.

    Args:
        state: of all chunks, from ``compare.sharded_states``.
        chunk: one of them.
        hybrid: whether to use the keys of ``HybridModel``.
    """
    spelled = translation(whole_config(chunk), own=is_hybrid(chunk), other=hybrid)
    for entries in state.values():
        for sharded in entries.values():
            sharded.key = spelled(sharded.key)
