"""Draft heads for speculative decoding, beside a policy of any family, as SpecForge and engines name them.

A DFlash head drafts a whole block of tokens at once. Its layers attend to the hidden states of several layers of the
policy, and to the block itself. It has neither an embedding nor an output layer.

A DSpark head is a DFlash head with two low-rank tables. They add to the logits of a token what the token before it
makes likely. It may also predict whether a token is accepted. Its published folders hold frozen copies of the embedding
and the output layer of the policy (``DeepSpec/deepspec/modeling/dspark``). SGLang skips them, and so do we.

An EAGLE3 head drafts one token after the other. Its one layer reads an embedding and a hidden state side by side. The
hidden state is a projection (``fc``) of three hidden states of the policy. SGLang and published folders call the layer
``midlayer``; vLLM takes ``layers.0``, too.
"""

from typing import TYPE_CHECKING

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.draft import BLOCK_DRAFT, DFLASH, DRAFT, DSPARK, EAGLE3, MARKOV_DRAFT, ONE_LAYER
from mcore_bridge.config.fields import Const, Ignore, Require
from mcore_bridge.config.tables import BIAS_ANY, BIAS_ATTENTION, DENSE, OWN_HEAD, QK_NORMED, QK_PLAIN, WINDOW_NONE, but
from mcore_bridge.models.blocks import GQA, NORMS, O_BIAS, QK_NORM, QKV_BIAS, SWIGLU, SWIGLU_BIAS
from mcore_bridge.rules.layout import REPLICATED, TARGET_VOCAB
from mcore_bridge.rules.mapping import Rules, numbered, second_names, table, under

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# fmt: off
_NORMS     = table(("input_layernorm.embedding.weight",  "input_layernorm.weight",          REPLICATED),
                   ("input_layernorm.hidden.weight",     "hidden_norm.weight",              REPLICATED),
                   ("pre_mlp_layernorm.weight",          "post_attention_layernorm.weight", REPLICATED))
_AROUND    = table(("fc.weight",                         "fc.weight",                       REPLICATED),
                   ("decoder.final_layernorm.weight",    "norm.weight",                     REPLICATED))
_FC_NORM   = numbered(table(("fc_norm.*.weight",         "fc_norm.*.weight",                REPLICATED)), count=3)
_EMBEDDING = table(("embedding.word_embeddings.weight",  "embed_tokens.weight",             TARGET_VOCAB))
_MAP       = table(("vocabulary.d2t",                    "d2t",                             REPLICATED),
                   ("vocabulary.t2d",                    "t2d",                             REPLICATED))
_CONTEXT   = table(("fc.weight",                         "fc.weight",                       REPLICATED),
                   ("context_norm.weight",               "hidden_norm.weight",              REPLICATED),
                   ("decoder.final_layernorm.weight",    "norm.weight",                     REPLICATED))
_MARKOV    = table(("markov_w1.weight",                  "markov_head.markov_w1.weight",    TARGET_VOCAB),
                   ("markov_w2.weight",                  "markov_head.markov_w2.weight",    TARGET_VOCAB))
_CONFIDENT = table(("confidence_head.weight",            "confidence_head.proj.weight",     REPLICATED),
                   ("confidence_head.bias",              "confidence_head.proj.bias",       REPLICATED))
# fmt: on
_OF_POLICY = Ignore(
    "they were copied from the policy, and neither SpecForge nor engines read them for a draft head",
    ("sliding_window", "max_window_layers", "decoder_sparse_step", "target_model_type"),
)
_WITHOUT_HEAD = Ignore("such a head uses embedding and output layer of its policy", ("tie_word_embeddings",))
_NOT_WRITTEN = "vLLM reads it, and nobody has written other values"
_READ_BY_VLLM = (
    *(Require("is_causal", (False, None), _NOT_WRITTEN), Require("is_neox_style", (True, None), _NOT_WRITTEN)),
    *(Require(name, (None, False), _NOT_WRITTEN) for name in ("draft_vocab_size", "add_swa_attention_sink_bias")),
)
_OF_BLOCKS = Ignore(
    "target_layer_ids says which layers are read, and no layer of the head slides",
    ("num_target_layers", "sliding_window", "max_window_layers"),
)
_BLOCK_LAYERS = (*_CONTEXT, *under("decoder.layers.*", "layers.*", NORMS, GQA, QKV_BIAS, O_BIAS, QK_NORM, SWIGLU))
_BLOCK_FIELDS = (
    *but(DENSE, Const("share_embeddings_and_output_weights", False), _WITHOUT_HEAD, *_READ_BY_VLLM),
    *(*BIAS_ATTENTION, *but(WINDOW_NONE, _OF_BLOCKS), *QK_NORMED),
    Require("use_sliding_window", (False, None), "nobody has written windows of a head that drafts blocks"),
)
_OF_TRAINING = Ignore(
    "only SpecForge or DeepSpec read them, for training", ("num_anchors", "confidence_head_alpha", "attention_mode")
)
_AT_FIRST = "nobody has written blocks that draft nothing at their first place"
_DSPARK_FIELDS = (
    *(*_BLOCK_FIELDS, MARKOV_DRAFT, _OF_TRAINING),
    Require("markov_head_type", ("vanilla",), "vLLM has no others, and no config of DeepSpec or SpecForge has them"),
    Require("projector_type", ("dspark", None), "it is the kind of the head"),
    *(Require("sample_from_anchor", (True, None), _AT_FIRST), Require("dspark_bonus_anchor", (False, None), _AT_FIRST)),
)
_LAYER = (_NORMS, GQA, QKV_BIAS, O_BIAS, SWIGLU, SWIGLU_BIAS)


def _rules(hf: "PretrainedConfig") -> Rules:
    """The rules of a head. A source may call its layer ``layers.0``; a save writes ``midlayer``."""
    first, second = (under("decoder.layers.0", name, *_LAYER) for name in ("midlayer", "layers.0"))
    return (*_AROUND, *first, *second_names(second), *_optional(hf))


def _optional(hf: "PretrainedConfig") -> Rules:
    """The rules of the modules that only some heads have."""
    has = ((getattr(hf, "fc_norm", False), _FC_NORM), (hf.own_embedding, _EMBEDDING), (hf.has_map, _MAP))
    return tuple(rule for held, rules in has if held for rule in rules)


DRAFTS = (
    Architecture(
        model_type=EAGLE3,
        fields=(
            *but(DENSE, *OWN_HEAD, ONE_LAYER),
            *(*BIAS_ANY, *but(WINDOW_NONE, _OF_POLICY), *QK_PLAIN, DRAFT),
            Require("use_sliding_window", (False, None), "no layer of a draft head slides"),
            Require("norm_output", (True, None), "vLLM and SpecForge disagree on what it means"),
        ),
        rules=_rules,
        classes=("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"),
        reads_as="llama",
        published_fields=(("vocab_size", "draft_vocab_size"), ("target_vocab_size", "vocab_size")),
    ),
    Architecture(
        model_type=DFLASH,
        fields=(*_BLOCK_FIELDS, BLOCK_DRAFT),
        rules=lambda hf: _BLOCK_LAYERS,
        classes=("DFlashDraftModel",),
        reads_as="qwen3",
    ),
    Architecture(
        model_type=DSPARK,
        fields=_DSPARK_FIELDS,
        rules=lambda hf: (*_BLOCK_LAYERS, *_MARKOV, *(_CONFIDENT if hf.enable_confidence_head else ())),
        ignored=("embed_tokens.weight", "lm_head.weight"),
        classes=("Qwen3DSparkModel", "DSparkDraftModel"),
        reads_as="qwen3",
    ),
)
