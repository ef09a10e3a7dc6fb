"""Shared config tables. An architecture joins ``DENSE`` with one table each for biases, windows and query-key norms.

They contain the fields of both transformers 4.57 and 5. A name that the installed release lacks has no effect.
"""

from torch.nn.functional import silu

from mcore_bridge.config.fields import Const, Field, Ignore, Map, Preset, Require
from mcore_bridge.config.tables import derived, derived_latent, derived_rope, scales

EMBEDDING_DROPOUT = "embedding_dropout"


def unread(*names: str) -> Ignore:
    """Fields of published configs that the modelling code of transformers does not read."""
    return Ignore("transformers does not read it", names)


IDENTITY = Ignore(
    "they name the model, its files and the program that wrote them",
    (
        *("model_type", "architectures", "transformers_version", "_name_or_path", "_commit_hash", "tokenizer_class"),
        *("task_specific_params", "finetuning_task", "transformers.js_config", "unsloth_fixed", "unsloth_version"),
        *("is_llama_config",),
    ),
)
RUNTIME = Ignore(
    "they choose how transformers runs the model or what it returns, not what it computes",
    (
        *("use_cache", "return_dict", "output_hidden_states", "output_attentions", "output_scores", "torchscript"),
        *("use_return_dict", "return_dict_in_generate", "chunk_size_feed_forward", "pretraining_tp"),
        *(
            "trust_remote_code",
            "tf_legacy_loss",
            "use_bfloat16",
            "gradient_checkpointing",
            "_attn_implementation_autoset",
        ),
        *(
            "cache_implementation",
            "attn_implementation",
            "_attn_implementation",
            "_output_attentions",
            "_experts_implementation",
        ),
    ),
)
DTYPE = Ignore("the argument dtype decides", ("dtype", "torch_dtype"))
LABELS = Ignore(
    "they belong to a classification head, which the argument head decides",
    ("id2label", "label2id", "num_labels", "problem_type"),
)
GENERATION = Ignore(
    "they are settings of generate()",
    (
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "prefix"),
        *("max_length", "max_new_tokens", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups"),
        *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "diversity_penalty"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences"),
        *("forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty"),
        *("suppress_tokens", "begin_suppress_tokens"),
    ),
)
TOKENS_OF_IMAGES = Ignore(
    "they are placeholder tokens for images, video or sound, which the text model never reads",
    (
        *("image_token_id", "image_token_index", "image_start_token_id", "image_end_token_id", "vision_token_id"),
        *("vision_start_token_id", "vision_end_token_id", "video_token_id", "video_token_index"),
        *("video_start_token_id", "video_end_token_id", "audio_token_id", "audio_token_index"),
        *("boi_token_index", "eoi_token_index", "boi_token_id", "eoi_token_id"),
        *("boa_token_id", "eoa_token_id", "eoa_token_index"),
    ),
)
DECODER_ONLY = tuple(
    Require(name, (neutral,), "the model is a decoder by itself")
    for name, neutral in (
        *(("is_decoder", False), ("is_encoder_decoder", False), ("add_cross_attention", False)),
        *(("cross_attention_hidden_size", None), ("tie_encoder_decoder", False)),
    )
)
PLAIN = (
    Require("pruned_heads", ({}, None), "megatron-core gives each layer the same heads"),
    derived.QUANTIZATION,
    Require("is_causal", (True, None), "megatron-core's GPTModel is causal"),
    Require("use_mrope", (False, None), "only multimodal models rotate by several position ids"),
    Require("rope_interleaved", (False, None), "transformers rotates halves, not neighbours"),
)
PUBLISHED_CODE = Ignore(
    "transformers has this family, or an equivalent one, so transformers' code is used instead of the published code",
    ("auto_map",),
)
BASE: tuple[Field, ...] = (
    IDENTITY,
    PUBLISHED_CODE,
    RUNTIME,
    DTYPE,
    LABELS,
    GENERATION,
    TOKENS_OF_IMAGES,
    *DECODER_ONLY,
    *PLAIN,
)

GEOMETRY: tuple[Field, ...] = (
    Map("num_hidden_layers", "num_layers"),
    Map("hidden_size", "hidden_size"),
    Map("intermediate_size", "ffn_hidden_size"),
    Map("max_position_embeddings", "max_sequence_length"),
    Map("tie_word_embeddings", "share_embeddings_and_output_weights"),
    Map("rms_norm_eps", "layernorm_epsilon"),
    Map("initializer_range", "init_method_std"),
    Map("attention_dropout", "attention_dropout", default=0.0),
    *(derived.HEADS, derived.VOCAB, derived.ACTIVATION, derived_rope.ROPE),
)
MATHS: tuple[Field, ...] = (
    Const("normalization", "RMSNorm"),
    Const("layernorm_zero_centered_gamma", False),
    Const("gated_linear_unit", True),
    Const("rotary_interleaved", False),
    Const("position_embedding_type", "rope"),
)
TRAINING: tuple[Field, ...] = (
    Preset("hidden_dropout", 0.0),
    Preset("moe_token_dispatcher_type", "alltoall"),  # mcore's default cannot do variable_seq_lengths, dense or not
)
DECODER: tuple[Field, ...] = (*BASE, *GEOMETRY, *MATHS, *TRAINING)
"""A decoder with RMSNorm and gated MLPs. The architecture adds tables for biases, windows, query-key norms, experts."""
DENSE: tuple[Field, ...] = (*DECODER, Const("num_moe_experts", None))

BIAS_NONE: tuple[Field, ...] = (
    Const("add_bias_linear", False),
    Const("add_qkv_bias", False),
    Preset("attention_output_bias", False),
)
BIAS_QKV: tuple[Field, ...] = (
    Const("add_bias_linear", False),
    Const("add_qkv_bias", True),
    Preset("attention_output_bias", False),
)
BIAS_EVERYWHERE: tuple[Field, ...] = (
    *(Const("add_bias_linear", True), Const("add_qkv_bias", True), Const("attention_output_bias", True)),
)
BIAS_ATTENTION: tuple[Field, ...] = (derived.ATTENTION_BIAS,)
BIAS_ANY: tuple[Field, ...] = (derived.BIASES,)

WINDOW_NEVER: tuple[Field, ...] = (
    *(Const("window_size", None), Const("window_attn_skip_freq", None)),
    Require("sliding_window", (None,), "no layer of this family slides"),
)
WINDOW_NONE: tuple[Field, ...] = (*WINDOW_NEVER, derived.FULL_LAYERS)
WINDOW_ALL: tuple[Field, ...] = (derived.WINDOW,)
WINDOW_IF_USED: tuple[Field, ...] = (
    derived.WINDOW_IF_USED,
    Ignore("every layer slides, or none does", ("max_window_layers",)),
)
WINDOW_OFF: tuple[Field, ...] = (
    derived.NO_WINDOWS,
    Require("use_sliding_window", (False,), "versions of transformers disagree on which layers of this model slide"),
    Ignore("no layer slides", ("sliding_window", "max_window_layers")),
)
WINDOW_BY_LAYER: tuple[Field, ...] = (
    derived.WINDOWS,
    Ignore("transformers has made layer_types and sliding_window of them", ("use_sliding_window", "max_window_layers")),
)
WINDOW_SWITCHED: tuple[Field, ...] = (derived.SWITCHED, unread("max_window_layers"))

PLAIN_MLP: tuple[Field, ...] = (Const("gated_linear_unit", False),)
INTERLEAVED: tuple[Field, ...] = (Const("rotary_interleaved", True),)
_PATTERN = Ignore("transformers has made layer_types of it", ("sliding_window_pattern", "_sliding_window_pattern"))
WINDOW_PATTERN: tuple[Field, ...] = (derived.WINDOWS, _PATTERN)
WINDOW_OR_NOPE: tuple[Field, ...] = (derived_rope.WINDOW_OR_NOPE, _PATTERN)
SLIDES_OR_NOPE: tuple[Field, ...] = (
    derived_rope.SLIDES_OR_NOPE,
    Ignore("transformers has made layer_types of it", ("global_attn_every_n_layers",)),
)

QK_PLAIN: tuple[Field, ...] = (Const("qk_layernorm", False),)
QK_NORMED: tuple[Field, ...] = (Const("qk_layernorm", True),)
QK_NORMED_TOGETHER: tuple[Field, ...] = (*QK_NORMED, Const("qk_norm_kind", "all_heads"))
QK_NORMED_AFTER_ROPE: tuple[Field, ...] = (*QK_NORMED, Const("qk_norm_kind", "after_rope"))

NORM_UNWEIGHTED: tuple[Field, ...] = (Const("norm_weight", False),)
NORM_POST: tuple[Field, ...] = (Const("norm_placement", "post"),)
NORM_SANDWICH: tuple[Field, ...] = (Const("norm_placement", "sandwich"),)


def published(**values: object) -> tuple[Field, ...]:
    """Fields that have this value in all published models, or that the published code does not read."""
    reason = "no published model has another value, or its code computes this one for any"
    return tuple(Require(name, (value, None), reason) for name, value in values.items())


def layer_norm(epsilon: str) -> tuple[Field, ...]:
    """A LayerNorm instead of an RMSNorm, whose epsilon is the HF field ``epsilon``."""
    return (Const("normalization", "LayerNorm"), Map(epsilon, "layernorm_epsilon"))


ONE_NORM: tuple[Field, ...] = (Const("parallel_norms", 1),)
"""Attention and MLP read the same norm of the layer's input."""
NORM_UNBIASED: tuple[Field, ...] = (*layer_norm("layer_norm_eps"), Const("norm_bias", False), *ONE_NORM)
"""``ONE_NORM`` for a LayerNorm without a bias."""
SCALED_LOGITS: tuple[Field, ...] = (Map("logit_scale", "logit_scale"),)
OWN_HEAD: tuple[Field, ...] = (
    Const("share_embeddings_and_output_weights", False),
    Require("tie_word_embeddings", (False,), "nobody has written a tied head with another name, or with a bias"),
)
"""For an LM head with another name than ``lm_head.weight``, or with a bias."""


def dropout(residual: str, embedding: str | None = None) -> tuple[Field, ...]:
    """The HF fields of the dropout after attention and MLP, and after the embedding (None: no dropout there)."""
    after_embedding = Const(EMBEDDING_DROPOUT, 0.0) if embedding is None else Map(embedding, EMBEDDING_DROPOUT)
    return (Map(residual, "hidden_dropout"), after_embedding)


def but(table: tuple[Field, ...], *entries: Field) -> tuple[Field, ...]:
    """``table`` with ``entries``, which replace entries for the same HF fields or mcore names."""
    claimed = {name for entry in entries for name in entry.names}
    decided = {entry.mcore for entry in entries if isinstance(entry, Map | Const)}
    kept = (
        entry
        for entry in table
        if claimed.isdisjoint(entry.names) and not (isinstance(entry, Map | Const) and entry.mcore in decided)
    )
    return (*kept, *entries)


def without(table: tuple[Field, ...], *names: str) -> tuple[Field, ...]:
    """``table`` without entries that set one of these mcore names. Another entry then decides them together."""
    return tuple(entry for entry in table if not (isinstance(entry, Map | Const) and entry.mcore in names))


SILU_ONLY: tuple[Field, ...] = (
    Const("activation_func", silu),
    Require("hidden_act", ("silu",), "kernels or transformers have SiLU in convolutions or in routed experts"),
)
"""For families in which parts besides MLPs have an activation, which kernels or transformers know alone."""
GEMMA: tuple[Field, ...] = (
    *but(DENSE, Const("layernorm_zero_centered_gamma", True)),
    *(scales.EMBEDDING, *BIAS_ATTENTION),
    Require("use_bidirectional_attention", (None, False), "megatron-core's GPTModel is causal"),
)
"""Common to all Gemma: zero-centred norms, and embeddings that are multiplied by the root of the hidden size."""
GEMMA2: tuple[Field, ...] = (
    *but(GEMMA, derived.activation("hidden_activation", "hidden_act")),
    *(scales.QUERY, scales.LOGIT_SOFTCAP, *WINDOW_PATTERN, *NORM_SANDWICH),
)
"""Common to Gemma 2 and later: norms before and after each block, a query scale, and windows in some layers."""
LATENT: tuple[Field, ...] = (
    *but(DECODER, derived_latent.HEADS),
    Const("multi_latent_attention", True),
    Const("latent_norm_epsilon", 1e-6),
    *(*BIAS_NONE, *WINDOW_NEVER),
    *QK_PLAIN,  # not about the norms of latents; mcore would sum gradients of these norms over TP, by name
    Require("attention_bias", (False,), "megatron-core's down projections have no bias"),
    Require("mlp_bias", (False,), "megatron-core would give the attention output a bias too"),
    Require("rope_interleave", (True,), "megatron-core's latent attention rotates neighbours"),
)
"""A decoder with multi-latent attention: low-rank keys and values, in some models queries too; a part of each head is
rotated. In transformers the norms of latents have a separate epsilon. The architecture adds tables of experts.
"""
