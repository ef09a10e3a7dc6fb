"""Two ropes in one model: layers with a window use ``config.hf_sliding_rope``, all other layers use ``hf_rope``.

megatron-core computes one tensor of angles for all layers. Here this tensor holds the angles of both ropes, and each
layer takes the angles that it needs. If one rope rotates fewer dims of a head, zeros fill its angles up.

megatron-core looks for the window and the rope of a layer under its number. The numbers of layers within MTP layers
follow those of the decoder, or begin anew, depending on the release. So such a layer reads a config of one layer.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from mcore_bridge.config.layer_kinds import inner_config
from mcore_bridge.config.rope import ATTENTION_FACTOR, Rope
from mcore_bridge.factory.modules.backend import LayerContext, mixed
from mcore_bridge.factory.modules.rotary import HFRotaryEmbedding

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

_FULL, _SLIDING = 0, 1


def adapt_layer_rope(layer: Any, context: LayerContext) -> None:
    """Makes a layer's attention take only the angles of the layer's rope, if its config has an ``hf_sliding_rope``."""
    if getattr(context.config, "hf_sliding_rope", None) is None:
        return
    layer.self_attention.module = mixed(OwnRope, layer.self_attention.module)


def use_inner_rope(layer: Any, config: TransformerConfig) -> None:
    """Give a layer within an MTP layer the window and the rope of the layer that ``config.mtp_like_layer`` names."""
    if getattr(config, "mtp_like_layer", None) is not None:
        layer.self_attention.module = mixed(InnerRope, layer.self_attention.module)


def both_ropes(chunk: GPTModel) -> None:
    """Adds the rope of the sliding layers, if they have one, to the rope of the chunk."""
    config = chunk.config
    if (rope := getattr(config, "hf_sliding_rope", None)) is not None:
        sliding = HFRotaryEmbedding(rope, rotary_interleaved=config.rotary_interleaved, cp_group=chunk.pg_collection.cp)
        chunk.rotary_pos_emb = BothRotaryEmbeddings(chunk.rotary_pos_emb, sliding)


class BothRotaryEmbeddings(nn.Module):
    """The angles of two ropes, stacked."""

    def __init__(self, full: HFRotaryEmbedding, sliding: HFRotaryEmbedding) -> None:
        super().__init__()
        self.full, self.sliding = full, sliding

    def get_rotary_seq_len(self, *arguments: Any, **options: Any) -> int:
        """The length for which angles are needed, from mcore."""
        length: int = self.full.get_rotary_seq_len(*arguments, **options)
        return length

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        """The angles of both ropes, ``[2, s, 1, 1, the larger number of rotated dims]``."""
        both = self.full(*arguments, **options), self.sliding(*arguments, **options)
        widest = max(angles.size(-1) for angles in both)
        return torch.stack([nn.functional.pad(angles, (0, widest - angles.size(-1))) for angles in both])


class OwnRope(nn.Module):
    """Attention that gets the angles of two ropes, and uses the angles and the attention factor of its layer's rope."""

    def __init__(self, *places: Any, config: TransformerConfig, layer_number: int, **arguments: Any) -> None:
        slides = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        rope = config.hf_sliding_rope if slides else config.hf_rope
        if slides:
            config = _with_attention_factor(config, rope)
        super().__init__(*places, config=config, layer_number=layer_number, **arguments)
        self.rope, self.num_rotated = (_SLIDING if slides else _FULL), rope.rotary_dim

    def forward(self, *inputs: Any, rotary_pos_emb: Tensor, **options: Any) -> Any:
        own = rotary_pos_emb[self.rope, ..., : self.num_rotated]
        return super().forward(*inputs, rotary_pos_emb=own, **options)


class InnerRope(nn.Module):
    """Attention within an MTP layer, with the window and the rope of one layer of the decoder."""

    def __init__(self, *places: Any, config: TransformerConfig, layer_number: int, **arguments: Any) -> None:
        super().__init__(*places, config=inner_config(config), layer_number=1, **arguments)


def _with_attention_factor(config: TransformerConfig, rope: Rope) -> TransformerConfig:
    """A copy of ``config`` with the attention factor of ``rope``, which mcore's attention reads from the config."""
    own = copy.copy(config)
    for name in ATTENTION_FACTOR:
        vars(own).pop(name, None)
    vars(own).update(rope.to_mcore())
    return own
