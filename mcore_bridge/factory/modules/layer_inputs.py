"""Inputs of each layer beside the hidden state: from a second embedding of each token, and from the first.

The first stage computes the inputs of all layers at once, behind its embedding. Each layer takes its part where it adds
the output of its MLP. Every tensor-parallel rank holds all these weights but the second embedding, and with sequence
parallelism applies them to its own tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from mcore_bridge.factory.modules.backend import LayerContext, free_after_forward, read_tokens, require_tokens
from mcore_bridge.factory.modules.latent import ReplicatedLinear
from mcore_bridge.factory.modules.multipliers import EmbeddingScale, ScaledSum
from mcore_bridge.factory.modules.torch_modules import Norm

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


def adapt_layer_input(layer: Any, context: LayerContext) -> None:
    """Add an input of its own to a layer, if its config has a ``layer_input_size``."""
    if getattr(context.config, "layer_input_size", None) is None:
        return
    layer.mlp_bda = ModuleSpec(LayerInput, {"config": context.config, "number": context.number})


def add_layer_inputs(chunk: GPTModel) -> None:
    """Let the embedding of a chunk compute the inputs of its layers, if ``config.layer_input_size`` is set."""
    if getattr(chunk.config, "layer_input_size", None) is None:
        return
    layers = [layer.mlp_bda for layer in chunk.decoder.layers]
    chunk.embedding.layer_inputs = of_layers = LayerInputs(chunk.config, chunk.vocab_size)

    def give(tokens: Tensor, embedded: Tensor) -> None:
        parts = of_layers(tokens, embedded)
        for layer in layers:
            layer.given = parts[..., layer.number, :]

    read_tokens(chunk, give)
    free_after_forward(chunk.decoder, layers, given=None)


class LayerInputs(MegatronModule):
    """The inputs of all layers: a second embedding, and a normed projection of the first, added and scaled."""

    def __init__(self, config: Any, padded_vocab: int) -> None:
        super().__init__(config)
        self.size, self.sequence_parallel = config.layer_input_size, config.sequence_parallel
        self.scale = config.hidden_size**-0.5
        width = config.num_layers * self.size
        self.word_embeddings = VocabParallelEmbedding(
            padded_vocab,
            width,
            init_method=config.init_method,
            reduce_scatter_embeddings=self.sequence_parallel,
            config=config,
        )
        self.word_embeddings.register_forward_hook(EmbeddingScale(self.size**0.5))
        self.projection = ReplicatedLinear(config.hidden_size, width, config)
        self.layernorm = Norm(config, self.size, eps=config.layernorm_epsilon)

    def forward(self, tokens: Tensor, embedded: Tensor) -> Tensor:
        """From tokens ``[b, s]`` and their embeddings ``[s, b, h]`` of this rank, ``[s, b, layers, size]``."""
        own = self.word_embeddings(tokens)
        own = own if self.sequence_parallel else own.transpose(0, 1)
        projected, _ = self.projection(embedded)
        normed: Tensor = self.layernorm((projected * self.scale).unflatten(-1, (-1, self.size)))
        return (normed + own.unflatten(-1, (-1, self.size))) * 2.0**-0.5


class LayerInput(ScaledSum):
    """The last addition of a layer, to which the gated input of the layer is added. The sum is scaled."""

    given: Tensor | None = None

    def __init__(self, config: Any, number: int) -> None:
        super().__init__(config)
        self.number, self.activation = number, config.activation_func
        self.gate = ReplicatedLinear(config.hidden_size, config.layer_input_size, config)
        self.projection = ReplicatedLinear(config.layer_input_size, config.hidden_size, config)
        self.layernorm = Norm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def added(self, total: Tensor) -> Tensor:
        """``total``, the sum of MLP and residual, with the input of the layer behind gate, projection and norm."""
        given = require_tokens(self.given, "layers have inputs from a second embedding")
        gated, _ = self.gate(total)
        projected, _ = self.projection(self.activation(gated) * given)
        normed: Tensor = self.layernorm(projected)
        return total + normed
