"""Scaled embeddings, residuals and logits, and capped logits, as in Granite and Gemma. Weights stay unchanged.

Forward hooks scale embeddings and logits. Residuals are scaled where a layer adds them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from mcore_bridge.factory.modules.backend import LayerContext, submodules_of
from mcore_bridge.factory.modules.output_layers import output_weight
from mcore_bridge.factory.modules.torch_modules import placement

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

    Add = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


def scale_embedding(chunk: GPTModel) -> None:
    """Multiplies word embeddings by ``config.embedding_scale``, if it is set. A tied output layer is not scaled."""
    scale = getattr(chunk.config, "embedding_scale", None)
    if scale is not None and hasattr(chunk, "embedding"):
        chunk.embedding.word_embeddings.register_forward_hook(EmbeddingScale(scale))


def cap_logits(chunk: GPTModel) -> None:
    """Cap logits softly at plus and minus ``config.logit_softcap``, if it is set, and note the value on the weight."""
    cap = getattr(chunk.config, "logit_softcap", None)
    if cap is not None and chunk.post_process:
        chunk.output_layer.register_forward_hook(LogitSoftcap(cap))
        output_weight(chunk).logit_softcap = cap


def scale_logits(chunk: GPTModel) -> None:
    """Multiplies logits by ``config.logit_scale``, or divides them by ``config.logit_divisor``.

    Both values are also an attribute of the output weight, where fused kernels look for them.
    """
    scale, divisor = (getattr(chunk.config, name, None) for name in ("logit_scale", "logit_divisor"))
    if chunk.post_process and (scale is not None or divisor is not None):
        chunk.output_layer.register_forward_hook(LogitScale(scale, divisor))
        output_weight(chunk).logit_scale = (scale, divisor)


class EmbeddingScale:
    """A forward hook that multiplies by the scale, rounded to the dtype of the embeddings as in transformers."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return output * torch.tensor(self.scale).to(output.dtype).item()


class LogitScale:
    """A forward hook of the LM head. Scale and divisor are separate: products and quotients round differently."""

    def __init__(self, scale: float | None, divisor: float | None) -> None:
        self.scale, self.divisor = scale, divisor

    def __call__(
        self, module: nn.Module, inputs: object, output: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        logits, bias = output
        logits = logits if self.scale is None else logits * self.scale
        return (logits if self.divisor is None else logits / self.divisor), bias


class LogitSoftcap:
    """A forward hook of the LM head, whose output is the logits, and a bias that is not yet added."""

    def __init__(self, cap: float) -> None:
        self.cap = cap

    def __call__(
        self, module: nn.Module, inputs: object, output: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        logits, bias = output
        return torch.tanh(logits / self.cap) * self.cap, bias


def adapt_residuals(layer: Any, context: LayerContext) -> None:
    """Replaces the additions of residuals in a layer by ``multiplied``, if its config has a multiplier.

    ``residual_multiplier`` is for attention and MLP, ``expert_multiplier`` only for experts. With ``layer_scalar``, the
    output of the layer is multiplied by a number of the checkpoint.
    """
    config = context.config
    multiplier, of_experts = (getattr(config, f"{name}_multiplier", None) for name in ("residual", "expert"))
    if multiplier is not None:
        layer.self_attn_bda = layer.mlp_bda = multiplied(multiplier)
    if of_experts is not None and hasattr(submodules_of(layer.mlp), "router"):
        layer.mlp_bda = multiplied(of_experts)
    if getattr(config, "layer_scalar", False):
        layer.mlp_bda = ModuleSpec(ScaledSum, {"config": config})


@functools.cache
def multiplied(multiplier: float) -> Callable[[bool, bool], Add]:
    """megatron-core's ``get_bias_dropout_add``, with a multiplier and without a fused kernel."""

    def get_bias_dropout_add(training: bool, fused: bool) -> Add:
        def add(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, probability: float) -> Tensor:
            output, bias = output_with_bias
            output = output if bias is None else output + bias
            return residual + nn.functional.dropout(output * multiplier, probability, training)

        return add

    return get_bias_dropout_add


class ScaledSum(nn.Module):
    """The last addition of a layer. Its sum is multiplied by a number of the checkpoint, which is not trained."""

    layer_scalar: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.register_buffer("layer_scalar", torch.ones(1, **placement(config)))

    def forward(self, training: bool, fused: bool) -> Add:
        """The addition, as megatron-core's ``get_bias_dropout_add`` returns it."""
        from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

        add: Add = get_bias_dropout_add(training, fused)

        def add_and_scale(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, rate: float) -> Tensor:
            total = self.added(add(output_with_bias, residual, rate))
            return total * self.layer_scalar.to(total.dtype)

        return add_and_scale

    def added(self, total: Tensor) -> Tensor:
        """``total``, with whatever else a layer adds before the scale."""
        return total
