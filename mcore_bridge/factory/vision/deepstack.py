"""Deepstack: features from several depths of a tower, which are added after the first layers of the text.

megatron-core has no argument for these features. They are passed in ``attention_bias``, which megatron-core gives to
each layer, also in a recompute. Each microbatch has a separate object, so microbatches do not mix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mcore_bridge.errors import MeshError
from mcore_bridge.factory.modules.backend import mixed

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from mcore_bridge.composite import Whole
    from mcore_bridge.config.mesh.pipeline import Stage


@dataclass(frozen=True, slots=True)
class LayerFeatures:
    """The features of a microbatch for its layers, passed in the place of ``attention_bias``.

    Attributes:
        features: ``[s, b, h]`` each: feature ``i`` is added after layer ``i``.
    """

    features: Sequence[Tensor]


def count_features(whole: Whole) -> int:
    """The number of depths of a composite's tower, each of which has a feature for one of the first layers."""
    return len(getattr(getattr(whole.core, "vision_config", None), "deepstack_visual_indexes", None) or ())


def require_layers(count: int, first: Stage) -> None:
    """Raise ``MeshError`` if the first stage has fewer layers than features; only this stage has features."""
    if count > len(first.layers):
        raise MeshError(
            f"the first pipeline stage must have at least {count} layers, one for each feature that the tower adds "
            f"to the text, found {len(first.layers)}: use fewer stages, or a layout"
        )


def take_features(chunk: GPTModel) -> None:
    """Make layers add the features that a microbatch has for them."""
    for layer in chunk.decoder.layers:
        layer.__class__ = mixed(Deepstacked, layer.__class__)


class Deepstacked(nn.Module):
    """A transformer layer that adds a feature of the tower to its output, if the microbatch has one."""

    def forward(self, *args: Any, attention_bias: Any = None, **kwargs: Any) -> Any:
        if not isinstance(attention_bias, LayerFeatures):
            return super().forward(*args, attention_bias=attention_bias, **kwargs)
        hidden, *rest = super().forward(*args, attention_bias=None, **kwargs)
        index = int(self.layer_number) - 1  # type: ignore[arg-type]
        features = attention_bias.features
        return hidden + features[index] if index < len(features) else hidden, *rest


def at_tokens(features: Tensor, where: Tensor, hidden: Tensor) -> Tensor:
    """Features ``[n, h]`` at the n places of ``where`` ``[b, s]``, and zeros elsewhere: ``[b, s, h]``."""
    return torch.zeros_like(hidden).index_put(tuple(where.nonzero(as_tuple=True)), features.to(hidden.dtype))


def carried(hidden: Tensor, features: Sequence[Tensor]) -> tuple[Tensor, LayerFeatures]:
    """Return ``hidden``, and its features for the layers. Gradients of features arrive with the gradient of ``hidden``.

    A recomputed layer runs a separate backward. If it used a feature directly, this backward would run the backward of
    the tower, once for each layer. So layers get leaf tensors, whose gradients are passed on when all layers are done.

    Args:
        hidden: the input of the first layer, ``[s, b, h]``.
        features: the features to add, in the shape of the hidden states.
    """
    if not torch.is_grad_enabled() or not any(feature.requires_grad for feature in features):
        return hidden, LayerFeatures(features)
    leaves = [feature.detach().requires_grad_() for feature in features]
    output: Tensor = _Port.apply(hidden, leaves, *features)
    return output, LayerFeatures(leaves)


class _Port(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, leaves: list[Tensor], *features: Tensor) -> Tensor:
        ctx.leaves = leaves
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, *(leaf.grad for leaf in ctx.leaves)  # the backward of all layers is done
