"""Layer specs: megatron-core's block spec of a backend, which the functions of one table adapt to a config.

Norms have the checkpoint keys of megatron-core's TransformerEngine specs, whatever the backend is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from mcore_bridge.config.layer_kinds import layer_config
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.attention_gate import adapt_gate
from mcore_bridge.factory.modules.backend import Backend, LayerContext, Selection, has_transformer_engine, submodules_of
from mcore_bridge.factory.modules.chunks import adapt_chunks
from mcore_bridge.factory.modules.compressed import adapt_compressed
from mcore_bridge.factory.modules.convolved import adapt_convolutions
from mcore_bridge.factory.modules.draft_heads import adapt_draft
from mcore_bridge.factory.modules.experts import adapt_experts, adapt_narrow_experts
from mcore_bridge.factory.modules.experts_beside import adapt_experts_beside
from mcore_bridge.factory.modules.gate_limits import adapt_clip, adapt_limits
from mcore_bridge.factory.modules.half_layers import adapt_halves
from mcore_bridge.factory.modules.latent import adapt_latent, adapt_sparse
from mcore_bridge.factory.modules.layer_inputs import adapt_layer_input
from mcore_bridge.factory.modules.layer_rope import adapt_layer_rope
from mcore_bridge.factory.modules.learned_activation import adapt_activation
from mcore_bridge.factory.modules.mixers.delta import adapt_linear_attention, adapt_output_gate
from mcore_bridge.factory.modules.multipliers import adapt_residuals
from mcore_bridge.factory.modules.ngram_inputs import adapt_ngrams
from mcore_bridge.factory.modules.norms import (
    adapt_expert_norm,
    adapt_norm_placement,
    adapt_query_key_norms,
    adapt_unweighted_norms,
    final_norm,
)
from mcore_bridge.factory.modules.parallel_blocks import adapt_parallel
from mcore_bridge.factory.modules.root_router import adapt_root_scores
from mcore_bridge.factory.modules.scored_sharing import adapt_scored_sharing
from mcore_bridge.factory.modules.scores import adapt_relative, adapt_scores
from mcore_bridge.factory.modules.selection import adapt_selection
from mcore_bridge.factory.modules.shared_keys import adapt_shared_keys
from mcore_bridge.factory.modules.streams import adapt_streams, has_streams, merging
from mcore_bridge.factory.modules.te_attention import adapt_kernel
from mcore_bridge.factory.modules.temperature import adapt_query_temperature
from mcore_bridge.factory.modules.torch_modules import CoreAttention, Norm, always_biased
from mcore_bridge.factory.modules.values import adapt_values
from mcore_bridge.rules.names import INDEXER, fused_norms


def block_spec(config: TransformerConfig, layers: range, *, backend: Backend) -> TransformerBlockSubmodules:
    """mcore's block spec of a stage, with our modules. Each layer has its own spec object, which can be edited.

    Args:
        config: the config of the model, with the attributes of ``config.overrides.ATTRIBUTES``.
        layers: the layers of the stage, numbered (from 0) in the whole model.
        backend: "te" or "torch".
    """
    _require_recomputable(config)
    _require_no_recompute_of_layers(config)
    plain = copy.copy(config)
    plain.experimental_attention_variant = None  # 0.19 refuses it here; adapt_linear_attention reads it
    specs = get_gpt_decoder_layer_specs(plain, backend == "te", config.normalization)
    own = [copy.deepcopy(specs[layer]) for layer in layers]  # mcore uses one object for equal layers
    selection = Selection()
    for number, spec in zip(layers, own, strict=True):
        context = LayerContext(layer_config(config, number), number, backend, selection)
        for adapt in ADAPTATIONS:
            adapt(spec.submodules, context)
    return TransformerBlockSubmodules(layer_specs=own, layer_norm=merging(final_norm(backend, config), config))


def _require_recomputable(config: TransformerConfig) -> None:
    """Raises ``ConfigError`` for modules that mcore recomputes with TransformerEngine only."""
    asks = {"layernorm", "gdn_norm_out"}.intersection(config.recompute_modules or ())
    if config.recompute_granularity == "selective" and asks and not has_transformer_engine():
        raise ConfigError(
            f"recompute_modules must not have {sorted(asks)} without TransformerEngine, which megatron-core needs to "
            f"recompute them: install it, or remove them from {config.recompute_modules}"
        )


def _require_no_recompute_of_layers(config: TransformerConfig) -> None:
    """Raises ``ConfigError`` if whole layers are recomputed, which read more than megatron-core passes them again."""
    by_layer = getattr(config, "per_layer_config", None) or ()
    reads = any(own.get(name) is not None for own in by_layer for name in ("keys_of_layer", "ngram_layer"))
    if config.recompute_granularity == "full" and (reads or getattr(config, "layer_input_size", None) is not None):
        raise ConfigError(
            "recompute_granularity must not be 'full' for layers with inputs from a second embedding or from n-grams, "
            "or with keys of another layer: megatron-core passes a recomputed layer hidden states alone. Use "
            "'selective', with modules"
        )


def adapt_to_torch(layer: Any, context: LayerContext) -> None:
    """Put torch's norms and core attention into a layer's spec, with backend torch."""
    if context.backend != "torch":
        return
    layer.input_layernorm = layer.pre_mlp_layernorm = Norm
    attention = layer.self_attention.submodules
    attention.core_attention = CoreAttention
    if context.config.qk_layernorm:  # mcore 0.19 refuses a norm here otherwise
        attention.q_layernorm = attention.k_layernorm = Norm


def adapt_output_bias(layer: Any, context: LayerContext) -> None:
    """Give the output projection of attention a bias, if ``attention_output_bias`` is set."""
    if not getattr(context.config, "attention_output_bias", False):
        return
    attention = layer.self_attention.submodules
    attention.linear_proj = always_biased(attention.linear_proj)


_NONE = SimpleNamespace()  # a layer of one half has no attention


def adapt_checkpoint_keys(layer: Any, context: LayerContext) -> None:
    """Make ``sharded_state_dict`` use the keys of megatron-core's own TransformerEngine specs for norms.

    These specs fuse a norm into the linear layer that follows. Our specs may keep it separate, so without this a
    checkpoint would fit only one backend. megatron-core's local specs use these keys, too, but only for a dense GPT.
    """
    modules = {f"self_attention.{name}" for name in vars(getattr(layer.self_attention, "submodules", _NONE))}
    if layer.mlp is not IdentityOp and not hasattr(submodules_of(layer.mlp), "router"):
        modules.add("mlp.linear_fc1")
    if has_streams(context.config):
        modules |= {"input_layernorm.connection", "pre_mlp_layernorm.connection"}
    if context.config.dsa_indexer_topk is not None:
        modules.add(INDEXER)
    layer.sharded_state_dict_keys_map = fused_norms(modules)


ADAPTATIONS: tuple[Callable[[Any, LayerContext], None], ...] = (
    # The modules of a backend come first, since the later functions change or wrap them.
    adapt_to_torch,
    adapt_experts,
    adapt_root_scores,  # its routers extend our routers
    adapt_narrow_experts,
    adapt_experts_beside,
    adapt_scored_sharing,
    # Other classes of attention are set before anything is mixed into them.
    adapt_latent,
    adapt_sparse,  # it takes the modules of our latent attention
    adapt_output_bias,
    adapt_output_gate,
    # The core attention is chosen before it is wrapped.
    adapt_scores,
    adapt_selection,
    adapt_convolutions,
    adapt_relative,  # it reads queries behind the projection of convolved keys
    adapt_kernel,  # it replaces TransformerEngine's core attention alone
    # Core attention is wrapped, and the class of attention is extended.
    adapt_chunks,
    adapt_query_temperature,
    adapt_layer_rope,
    adapt_gate,
    adapt_values,
    adapt_shared_keys,
    adapt_query_key_norms,  # norms after the rope see queries before their temperature
    # Norms around attention and MLP. These functions take linear layers without a norm inside.
    adapt_unweighted_norms,
    adapt_norm_placement,
    adapt_expert_norm,
    adapt_streams,  # it may choose another linear layer, which limits wrap
    adapt_ngrams,
    adapt_limits,
    adapt_clip,
    adapt_activation,
    adapt_parallel,
    adapt_residuals,
    adapt_layer_input,  # its addition also scales the output of the layer
    # Linear attention, compressed attention or a mixer takes the place of attention, or a half of the layer is removed.
    adapt_linear_attention,
    adapt_compressed,
    adapt_halves,
    adapt_checkpoint_keys,  # it reads the names of all modules
    adapt_draft,  # it takes a norm out of these keys
)
"""The functions that put our modules into a layer's spec, in the order in which they run.

Each function takes the submodules of one layer, which it changes in place, and the context of this layer. No other
layer may share these submodules. A function leaves a layer unchanged if the config does not ask for its modules.
"""
