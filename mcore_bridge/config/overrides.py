"""Checks of overrides: their names exist in the installed megatron-core, and their values fit the HF config."""

import dataclasses
import functools
import inspect
from collections.abc import Iterable, Mapping, Set
from difflib import get_close_matches
from typing import TYPE_CHECKING

from torch.nn.functional import gelu, silu

from mcore_bridge.config.layer_kinds import sized_by_layer
from mcore_bridge.config.mesh.parallel_dims import DIM_OF
from mcore_bridge.config.rope import ATTENTION_FACTOR
from mcore_bridge.errors import ConfigError

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

ATTRIBUTES = frozenset(
    (
        *("hf_rope", "hf_sliding_rope", "hf_vocab_size", "attention_output_bias", "latent_norm_epsilon"),
        *("norm_placement", "qk_norm_kind", "attention_softcap", "logit_softcap", "embedding_scale"),
        *("embedding_dropout", "router_norm_min", "residual_multiplier", "logit_scale", "logit_divisor"),
        *("parallel_norms", "norm_bias", "output_layer_bias", "expert_norm", "expert_multiplier"),
        *("layer_kinds", "mamba_conv_kernel", "short_conv_kernel", "mamba_norm", "side_multipliers"),
        *("mtp_kinds", "mtp_like_layer", "attention_chunks", "nope_temperature", "per_layer_config"),
        *("attention_gate", "attention_gate_activation", "expert_latent_size", "value_norm", "keys_as_values"),
        *("layer_scalar", "kda_full_rank", "kda_rate_dims", "kda_lower_bound"),
        *("delta_negative_eigenvalues", "delta_gate_activation"),
        *("head_norm_epsilon", "experts_beside_mlp", "router_scales", "glu_limit", "expert_glu_limit", "draft"),
        *("post_norm_epsilon", "embedding_norm", "final_norm_centered", "limits_before_activation"),
        *("enable_mhc_connections", "mhc_num_residual_streams", "mhc_sinkhorn_iterations", "mhc_magnitude"),
        *("mhc_epsilon", "mhc_merges_evenly", "mhc_rank", "value_channels", "value_scale"),
        *("dsa_indexer_pool", "dsa_indexer_topk_freq", "dsa_indexer_skip_topk_offset"),
        *("dsa_indexer_block", "dsa_indexer_local_blocks"),
        *("compression", "compression_ratios", "query_rank", "output_groups", "output_rank"),
        *("root_scores", "experts_by_token", "ngrams", "ngram_layer"),
        *("norm_weight", "qkv_clip", "keys_of_layer", "layer_input_size", "unpadded_vocab_size", "query_growth"),
        *("residual_convolutions", "relative_profiles", "relative_extent", "shared_experts_scored"),
        *ATTENTION_FACTOR,
    )
)
"""Attributes that we add to a config, beyond mcore's fields. Only ``hf_vocab_size`` is always there.
``copy.deepcopy`` keeps them, and ``dataclasses.replace`` does not.

For ``build_model``:

* ``hf_rope``: the ``Rope`` of the model, if it has one;
* ``hf_vocab_size``: the size of the vocabulary without padding;
* ``hf_sliding_rope``: the ``Rope`` of sliding-window layers, if they have another one;
* ``attention_output_bias``: whether ``o_proj`` has a bias;
* ``latent_norm_epsilon``: the epsilon of the norms of low-rank queries, keys and values;
* ``norm_placement``: "pre" (mcore's), "post" (after attention and MLP) or "sandwich" (both);
* ``qk_norm_kind``: "head" (mcore's), "all_heads" (one norm over all of them), "each_head" (own weights in each) or
  "after_rope", or "after_rope_unweighted" in layers that have a rope, or "unweighted" (before the rope);
* ``post_norm_epsilon``: the epsilon of norms after attention and MLP, if they have another one;
* ``embedding_norm``: "weighted" or "unweighted", if a norm follows the word embeddings;
* ``unpadded_vocab_size``: the number of tokens that have logits, if HF pads its vocabulary;
* ``residual_convolutions``: whether short convolutions are added to keys, values, and the outputs of attention and MLP;
* ``relative_profiles``, ``relative_extent``: the number of learned scores by distance that queries mix, and how many
  distances they have;
* ``query_growth``: ``(beta, length)``, by which queries of a layer grow with their position from this length on;
* ``shared_experts_scored``: whether the router scores shared experts too, and weighs each of them;
* ``norm_weight``: whether norms of layers and the final norm have weights (mcore's always have some);
* ``qkv_clip``: the bound of queries, keys and values before their rope, on both sides;
* ``final_norm_centered``: whether the weight of the final norm is zero-centered, if this differs from other norms;
* ``per_layer_config``: for each layer the fields in which it differs from the model (``layer_kinds.py``), if any does;
* ``attention_chunks``: for each layer the number of tokens within which it attends, and 0 if it attends to the whole
  text;
* ``nope_temperature``: ``(beta, length)``, by which queries of layers without a rope grow with their position;
* ``attention_gate``: "head" or "element", each of which has a gate of its own projection behind attention;
* ``attention_gate_activation``: of these gates, "sigmoid" or "softplus" (in fp32);
* ``value_norm``: whether values have a norm without weights in each head;
* ``keys_of_layer``: of a layer, the number (from 0) of the layer whose keys and values it reads. It is the number of
  the layer itself if others read its keys, and None if it shares none;
* ``layer_input_size``: the size of an input that each layer has from a second embedding, if it has one;
* ``value_channels``: the width of a head's values, if it is not the width of its keys (``kv_channels``);
* ``value_scale``: values of such a width are multiplied by it;
* ``keys_as_values``: whether values are the keys before their norm, so that no projection computes them;
* ``draft``: what a draft head has beside the fields of a decoder (``draft.py``), if the model is one;
* ``experts_beside_mlp``: whether a shared expert is a dense MLP beside the experts, and both have norms of their own;
* ``router_scales``: whether a router norms and scales its input, and multiplies weights of experts by a number each;
* ``layer_scalar``: whether the output of each layer is multiplied by a number of the checkpoint;
* ``glu_limit``, ``expert_glu_limit``: the bound of gates behind SiLU, and of the values that they multiply; in MLPs and
  shared experts, and in routed experts;
* ``limits_before_activation``: whether these are limits of gates before SiLU;
* ``enable_mhc_connections``, ``mhc_num_residual_streams``, ``mhc_sinkhorn_iterations``: whether the residual has
  several streams, how many, and how often the matrix that mixes them is normed (0: they are not mixed). megatron-core
  0.20 has these fields;
* ``mhc_magnitude``, ``mhc_epsilon``: the largest weight of an addition to a stream, and what is added to weights;
* ``mhc_merges_evenly``: whether the final norm reads the mean of the streams, without weights of its own;
* ``mhc_rank``: the rank of the projection that gives each element of normed streams a gate. If it is None, each stream
  has a weight, to which ``mhc_epsilon`` is added, and the norm follows;
* ``dsa_indexer_pool``: how many neighbouring keys an indexer selects together, if it is more than one;
* ``dsa_indexer_block``, ``dsa_indexer_local_blocks``: how many neighbouring keys are one of the blocks that
  ``dsa_indexer_topk`` counts then, and how many blocks up to its own a query always sees;
* ``dsa_indexer_topk_freq``, ``dsa_indexer_skip_topk_offset``: which layers share a selection of keys. megatron-core
  0.19 has these fields;
* ``compression``: of a layer, which compressed keys it reads beside its window: "all", "selected" (by an indexer), or
  None;
* ``compression_ratios``: for each of these kinds, how many tokens have one compressed key;
* ``query_rank``, ``output_rank``: the sizes between the two projections of queries, and of the output of each group;
* ``output_groups``: how many groups of heads project their output by themselves;
* ``root_scores``: whether scores of routers are roots of softplus;
* ``experts_by_token``: of a layer, whether a table gives the experts of each token;
* ``ngrams``: the sizes of embeddings of n-grams (``tables/ngrams.py``), whether or not a layer has some;
* ``ngram_layer``: of a layer, its number (from 0) among layers with embeddings of n-grams, if it has some;
* ``attention_softcap``, ``logit_softcap``: the bounds of attention scores and of logits, enforced by a tanh;
* ``embedding_scale``: word embeddings are multiplied by it;
* ``embedding_dropout``: the dropout of the embedding, if it is not mcore's ``hidden_dropout``;
* ``router_norm_min``: with it, ``moe_router_enable_expert_bias`` works with softmax scores too. The weights of a
  token's experts are divided by their sum, or by this value if it is larger;
* ``residual_multiplier``: the outputs of attention and MLP are multiplied by it before they are added;
* ``expert_multiplier``: the summed output of a layer's experts is multiplied by it before it is added;
* ``logit_scale``, ``logit_divisor``: logits are multiplied by the one, or divided by the other;
* ``parallel_norms``: attention and MLP read the same input, through 1 norm or through 2;
* ``norm_bias``: whether a LayerNorm has a bias (mcore's always has one);
* ``output_layer_bias``: whether the LM head has a bias (mcore's never has one);
* ``expert_norm``: whether a norm follows the summed output of a layer's experts;
* ``layer_kinds``: the parts of each layer, if some layers have one half or a mixer. "M" is Mamba-2, "C" a short
  convolution, "K" Kimi delta attention, "*" attention, "-" an MLP and "E" experts. "M*-" is a mixer beside attention,
  and an MLP;
* ``delta_negative_eigenvalues``: whether beta of the gated delta rule is up to 2, not 1;
* ``delta_gate_activation``: of the gates behind the gated delta rule, "silu" or "sigmoid";
* ``head_norm_epsilon``: the epsilon of the norm of heads of linear attention, if it is not ``layernorm_epsilon``;
* ``kda_full_rank``: whether decay and gate of Kimi delta attention have one projection each, not two through narrow
  inputs;
* ``kda_rate_dims``: the number of dims of its tensor of decay rates, 1 or 4, as in checkpoints;
* ``kda_lower_bound``: the bound that a sigmoid sets to the logs of decays of Kimi delta attention; None: there is no
  bound, but a softplus;
* ``mtp_kinds``: the parts of the layer within an MTP layer, as in ``layer_kinds``, if it is not like the last layer. It
  has the sizes of the model then;
* ``mtp_like_layer``: the number (from 0) of the decoder layer that the layer within an MTP layer is like, if it is not
  the last;
* ``mamba_conv_kernel``: the kernel size (in tokens) of the convolution of a Mamba-2 mixer;
* ``short_conv_kernel``: the kernel size (in tokens) of short convolutions;
* ``mamba_norm``: whether the gated output of a mixer is normed, as it is without this attribute;
* ``side_multipliers``: the multipliers for the parts of a layer with a mixer beside its attention;
* ``expert_latent_size``: the width of routed experts, if it differs from the width of the model.

For mcore's attention: the attention factor of the rope (``yarn_...``).
"""

_BUILT = frozenset(
    ("config", "transformer_layer_spec", "mtp_block_spec", "pre_process", "post_process", "vp_stage", "pg_collection")
)


def config_class(*, latent: bool, by_layer: bool = False) -> "type[TransformerConfig]":
    """The installed ``TransformerConfig``, or its subclass for latent attention or for sizes that differ by layer."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    chosen = MLATransformerConfig if latent else TransformerConfig
    return sized_by_layer(chosen) if by_layer else chosen


@functools.cache
def config_fields(*, latent: bool) -> frozenset[str]:
    """The fields of ``config_class``."""
    return frozenset(field.name for field in dataclasses.fields(config_class(latent=latent)) if field.init)


@functools.cache
def gpt_argument_names() -> frozenset[str]:
    """The arguments of the installed ``GPTModel`` that a config decides; ``build_model`` decides all others."""
    from megatron.core.models.gpt import GPTModel

    return frozenset(inspect.signature(GPTModel.__init__).parameters) - {"self"} - _BUILT


def require_overridable(overrides: Iterable[str], *, decided: Set[str], latent: bool) -> None:
    known = config_fields(latent=latent) | gpt_argument_names()
    for name in overrides:
        if name in decided or name in DIM_OF:
            dim = f"ParallelDims({DIM_OF.get(name, name)}=...)"
            raise ConfigError(f"{name} must not be overridden: the mesh decides it. Set {dim} instead.")
        if name in _BUILT:
            raise ConfigError(
                f"{name} must not be overridden: build_model decides it on each rank. Remove the override."
            )
        if name not in known:
            near = get_close_matches(name, sorted(known), n=3)
            hint = f"; nearest names: {', '.join(near)}" if near else ""
            raise ConfigError(
                "An override must be a TransformerConfig field or a GPTModel argument of the installed megatron-core, "
                f"found {name!r}{hint}."
            )


def require_known(settings: Mapping[str, object], *, latent: bool) -> None:
    """Raise ``ConfigError`` for a name that a table sets, but no code of megatron-core or this library reads."""
    if unknown := sorted(settings.keys() - config_fields(latent=latent) - gpt_argument_names() - ATTRIBUTES):
        raise ConfigError(
            f"A table must set TransformerConfig fields or GPTModel arguments of the installed megatron-core, found "
            f"{unknown}. Correct the architecture, or install a megatron-core that has them."
        )


def require_vocab(padded: object, *, at_least: int, tp: int) -> None:
    if not isinstance(padded, int) or padded < at_least or padded % tp:
        raise ConfigError(
            f"vocab_size must be a multiple of tp={tp} and at least the {at_least} of the HF config, found {padded!r}. "
            "Change or remove the override."
        )


def require_activation(settings: Mapping[str, object]) -> None:
    """Raises ``ConfigError`` if an override chooses a kernel that computes another activation than the model's."""
    activation = settings.get("activation_func")
    if settings.get("bias_activation_fusion") and activation is gelu:
        raise ConfigError(
            "bias_activation_fusion must be False, found True: it approximates GELU by a tanh, and this model has the "
            "exact GELU. Remove the override."
        )
    plain = not settings.get("activation_func_clamp_value") and not settings.get("glu_linear_offset")
    if settings.get("moe_shared_expert_overlap") and not plain:
        raise ConfigError(
            "moe_shared_expert_overlap must be False, found True: megatron-core then computes shared experts without "
            "the clamp and the offset of this model's gates. Remove the override."
        )
    exact = activation is silu and settings.get("gated_linear_unit") and plain
    if settings.get("use_te_activation_func") and not exact:
        raise ConfigError(
            "use_te_activation_func must be False, found True: TransformerEngine's module computes only a gated SiLU "
            "without clamp and offset, and this model has another activation. Remove the override."
        )


def require_parameters(settings: Mapping[str, object]) -> None:
    """Raises ``ConfigError`` if parameters would be quantized in a way that loads and exports do not know."""
    if settings.get("fp4_param"):
        raise ConfigError(
            f"fp4_param must be False, found {settings['fp4_param']!r}: loads and exports know parameters in FP8, and "
            "none in FP4. Remove the override; fp4 works without it."
        )
    if settings.get("fp8_param") and not settings.get("fp8"):
        raise ConfigError(
            "fp8_param needs fp8, found no fp8: set it, too, such as fp8='e4m3' and fp8_recipe='blockwise', or remove "
            "fp8_param."
        )


def require_layers(settings: Mapping[str, object]) -> None:
    """Raises ``ConfigError`` if a list with one entry per layer is too short for ``num_layers``."""
    num_layers = settings.get("num_layers")
    for name in ("window_attn_skip_freq", "linear_attention_freq"):
        layers = settings.get(name)
        if isinstance(layers, list) and isinstance(num_layers, int) and len(layers) < num_layers:
            raise ConfigError(
                f"{name} must have an entry for each of the {num_layers} layers, found {len(layers)} entries. Override "
                "it together with num_layers."
            )


def require_chosen_experts(settings: Mapping[str, object]) -> None:
    """Raises ``ConfigError`` if a token chooses more experts than there are."""
    chosen, experts = settings.get("moe_router_topk"), settings.get("num_moe_experts")
    if isinstance(chosen, int) and isinstance(experts, int) and chosen > experts:
        raise ConfigError(
            f"The number of experts of a token must be at most {experts}, the number of routed experts, found "
            f"{chosen}. "
            "Correct num_experts_per_tok or moe_router_topk."
        )
