"""Layer specs: megatron-core's block spec of a backend, with submodules from ``modules`` if megatron-core's do not
work.

Norms have the checkpoint keys of megatron-core's TransformerEngine specs, whatever the backend is.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from mcore_bridge.config.layer_kinds import layer_config
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.backend import Backend, has_transformer_engine, submodules_of
from mcore_bridge.factory.modules.te_attention import adapt_kernel
from mcore_bridge.factory.modules.temperature import adapt_query_temperature
from mcore_bridge.rules.names import INDEXER, fused_norms

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from mcore_bridge.factory.modules.selection import Selection


def block_spec(config: TransformerConfig, layers: range, *, backend: Backend) -> TransformerBlockSubmodules:
    """mcore's block spec of a stage, with our modules. Each layer has its own spec object, which can be edited.

    Args:
        config: the config of the model, with the attributes of ``config.overrides.ATTRIBUTES``.
        layers: the layers of the stage, numbered (from 0) in the whole model.
        backend: "te" or "torch".
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from mcore_bridge.factory.modules.norms import final_norm
    from mcore_bridge.factory.modules.selection import Selection
    from mcore_bridge.factory.modules.streams import has_streams, merging

    _require_recomputable(config)
    _require_no_recompute_of_layers(config)
    plain = copy.copy(config)
    plain.experimental_attention_variant = None  # 0.19 refuses it here; adapt_attention reads it
    specs = get_gpt_decoder_layer_specs(plain, backend == "te", config.normalization)
    own = [copy.deepcopy(specs[layer]) for layer in layers]  # mcore uses one object for equal layers
    selection = Selection()
    for number, spec in zip(layers, own, strict=True):
        _adapt(spec.submodules, layer_config(config, number), number, backend, selection)
    norm = final_norm(backend, config)
    return TransformerBlockSubmodules(layer_specs=own, layer_norm=merging(norm) if has_streams(config) else norm)


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
    shares = any(own.get("keys_of_layer") is not None for own in by_layer)
    if config.recompute_granularity == "full" and (shares or getattr(config, "layer_input_size", None) is not None):
        raise ConfigError(
            "recompute_granularity must not be 'full' for layers with inputs from a second embedding, or with keys of "
            "another layer: megatron-core passes a recomputed layer hidden states alone. Use 'selective', with modules"
        )


def _adapt(layer: Any, config: TransformerConfig, number: int, backend: Backend, selection: Selection) -> None:
    """Puts our modules into the spec of layer ``number`` (from 0), which has this config.

    Layers that share a selection of keys share ``selection``.
    """
    _adapt_within(layer, config, number, backend, selection)
    _adapt_around(layer, config, number, backend)


def _adapt_within(layer: Any, config: TransformerConfig, number: int, backend: Backend, selection: Selection) -> None:
    """Our modules within attention and MLP."""
    from mcore_bridge.factory.modules.attention_gate import adapt_gate
    from mcore_bridge.factory.modules.chunks import adapt_chunks
    from mcore_bridge.factory.modules.convolved import adapt_convolutions
    from mcore_bridge.factory.modules.experts import adapt_experts, adapt_narrow_experts
    from mcore_bridge.factory.modules.experts_beside import adapt_beside
    from mcore_bridge.factory.modules.latent import adapt_latent, adapt_sparse
    from mcore_bridge.factory.modules.layer_rope import adapt_layer_rope
    from mcore_bridge.factory.modules.norms import adapt_query_key_norms, adapt_unit_norms
    from mcore_bridge.factory.modules.root_router import adapt_root_scores
    from mcore_bridge.factory.modules.scored_sharing import adapt_scored_sharing
    from mcore_bridge.factory.modules.scores import adapt_relative, adapt_scores
    from mcore_bridge.factory.modules.selection import adapt_selection
    from mcore_bridge.factory.modules.shared_keys import adapt_shared_keys
    from mcore_bridge.factory.modules.torch_modules import always_biased
    from mcore_bridge.factory.modules.values import adapt_values

    if backend == "torch":
        _use_torch_modules(layer, config)
    adapt_experts(layer, config, backend)
    adapt_root_scores(layer, config, backend)
    adapt_narrow_experts(layer, config)
    adapt_beside(layer, config, backend)
    adapt_latent(layer, config, backend)
    adapt_sparse(layer, config, backend)
    if getattr(config, "attention_output_bias", False):
        attention = layer.self_attention.submodules
        attention.linear_proj = always_biased(attention.linear_proj)
    adapt_scored_sharing(layer, config)
    adapt_scores(layer, config, backend)  # the core attention before the modules that wrap it
    adapt_selection(layer, config, backend, selection)
    adapt_convolutions(layer, config, backend)
    adapt_relative(layer, config, backend)
    if backend == "te":
        adapt_kernel(layer, config, number)
    adapt_chunks(layer, config, number)
    adapt_query_temperature(layer, config, number)
    adapt_layer_rope(layer, config, backend)
    adapt_gate(layer, config, backend)
    adapt_values(layer, config, backend)
    adapt_shared_keys(layer, config, number, backend)
    adapt_query_key_norms(layer, config, backend)
    adapt_unit_norms(layer, config, number)


def _adapt_around(layer: Any, config: TransformerConfig, number: int, backend: Backend) -> None:
    """Our modules around attention and MLP, or in place of them."""
    from mcore_bridge.factory.modules.compressed import adapt_compressed
    from mcore_bridge.factory.modules.draft_heads import adapt_draft
    from mcore_bridge.factory.modules.gate_limits import adapt_clip, adapt_limits
    from mcore_bridge.factory.modules.half_layers import adapt_halves
    from mcore_bridge.factory.modules.layer_inputs import adapt_layer_input
    from mcore_bridge.factory.modules.learned_activation import adapt_activation
    from mcore_bridge.factory.modules.mixers.delta import adapt_attention
    from mcore_bridge.factory.modules.multipliers import adapt_residuals
    from mcore_bridge.factory.modules.norms import adapt_expert_norm, adapt_norm_placement, adapt_unweighted_norms
    from mcore_bridge.factory.modules.parallel_blocks import adapt_parallel
    from mcore_bridge.factory.modules.streams import adapt_streams

    adapt_unweighted_norms(layer, config, backend)
    adapt_norm_placement(layer, config, backend)
    adapt_expert_norm(layer, config, backend)
    adapt_streams(layer, config, backend)  # it may take another linear layer, which limits wrap
    adapt_limits(layer, config)
    adapt_clip(layer, config)
    adapt_activation(layer, config)
    adapt_parallel(layer, config, backend)
    adapt_residuals(layer, config)
    adapt_layer_input(layer, config, number)
    adapt_attention(layer, config, number, backend)
    adapt_compressed(layer, config, backend)
    adapt_halves(layer, config, number, backend)
    adapt_keys(layer, config)
    adapt_draft(layer, config, backend)


def _use_torch_modules(layer: Any, config: TransformerConfig) -> None:
    from mcore_bridge.factory.modules.torch_modules import CoreAttention, Norm

    layer.input_layernorm = layer.pre_mlp_layernorm = Norm
    attention = layer.self_attention.submodules
    attention.core_attention = CoreAttention
    if config.qk_layernorm:  # mcore 0.19 refuses a norm here otherwise
        attention.q_layernorm = attention.k_layernorm = Norm


_NONE = SimpleNamespace()  # a layer of one half has no attention


def adapt_keys(layer: Any, config: TransformerConfig) -> None:
    """Make ``sharded_state_dict`` use the keys of megatron-core's own TransformerEngine specs for norms.

    These specs fuse a norm into the linear layer that follows. Our specs may keep it separate, so without this a
    checkpoint would fit only one backend. megatron-core's local specs use these keys, too, but only for a dense GPT.

    Args:
        layer: the submodules of a layer, with all its modules in place. It is changed in place.
        config: the config of the model.
    """
    from megatron.core.transformer.identity_op import IdentityOp

    from mcore_bridge.factory.modules.streams import has_streams

    modules = {f"self_attention.{name}" for name in vars(getattr(layer.self_attention, "submodules", _NONE))}
    if layer.mlp is not IdentityOp and not hasattr(submodules_of(layer.mlp), "router"):
        modules.add("mlp.linear_fc1")
    if has_streams(config):
        modules |= {"input_layernorm.connection", "pre_mlp_layernorm.connection"}
    if config.dsa_indexer_topk is not None:
        modules.add(INDEXER)
    layer.sharded_state_dict_keys_map = fused_norms(modules)
