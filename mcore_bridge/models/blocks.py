"""Shared tables of weight rules. Each block of a transformer is one table: mcore names, HF names, and layouts."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mcore_bridge.config import fields
from mcore_bridge.config.layer_kinds import counted_mtp_layers
from mcore_bridge.rules.layout import (
    COLUMN,
    FUSED_GATED_UP,
    FUSED_QKV,
    GATED_UP,
    QKV,
    QKV_OF_WIDTHS,
    REPLICATED,
    ROW,
    VOCAB,
)
from mcore_bridge.rules.mapping import Rule, Rules, experts, numbered, of_layers, table, under

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# fmt: off
EMBEDDING   = table(("embedding.word_embeddings.weight",    "model.embed_tokens.weight",       VOCAB))
FINAL_NORM  = table(("decoder.final_layernorm.weight",      "model.norm.weight",               REPLICATED))
NORMS       = table(("input_layernorm.weight",              "input_layernorm.weight",          REPLICATED),
                    ("pre_mlp_layernorm.weight",            "post_attention_layernorm.weight", REPLICATED))
ONE_NORM    = table(("input_layernorm.weight",              "input_layernorm.weight",          REPLICATED))
GQA         = table(("self_attention.linear_qkv.weight",    "self_attn.{q,k,v}_proj.weight",   QKV),
                    ("self_attention.linear_proj.weight",   "self_attn.o_proj.weight",         ROW))
GQA_OF_WIDTHS = table(("self_attention.linear_qkv.weight",  "self_attn.{q,k,v}_proj.weight",   QKV_OF_WIDTHS),
                    ("self_attention.linear_qkv.bias",      "self_attn.{q,k,v}_proj.bias",     QKV_OF_WIDTHS),
                    ("self_attention.linear_proj.weight",   "self_attn.o_proj.weight",         ROW))
QKV_BIAS    = table(("self_attention.linear_qkv.bias",      "self_attn.{q,k,v}_proj.bias",     QKV))
O_BIAS      = table(("self_attention.linear_proj.bias",     "self_attn.o_proj.bias",           REPLICATED))
QK_NORM     = table(("self_attention.q_layernorm.weight",   "self_attn.q_norm.weight",         REPLICATED),
                    ("self_attention.k_layernorm.weight",   "self_attn.k_norm.weight",         REPLICATED))
MLA         = under("self_attention", "self_attn", table(
                    ("linear_q_proj.weight",                "q_proj.weight",                   COLUMN),
                    ("linear_q_down_proj.weight",           "q_a_proj.weight",                 REPLICATED),
                    ("q_layernorm.weight",                  "q_a_layernorm.weight",            REPLICATED),
                    ("linear_q_up_proj.weight",             "q_b_proj.weight",                 COLUMN),
                    ("linear_kv_down_proj.weight",          "kv_a_proj_with_mqa.weight",       REPLICATED),
                    ("kv_layernorm.weight",                 "kv_a_layernorm.weight",           REPLICATED),
                    ("linear_kv_up_proj.weight",            "kv_b_proj.weight",                COLUMN),
                    ("linear_proj.weight",                  "o_proj.weight",                   ROW)))
GATED_MLP   = table(("linear_fc1.weight",                   "{gate,up}_proj.weight",           GATED_UP),
                    ("linear_fc2.weight",                   "down_proj.weight",                ROW))
SWIGLU      = under("mlp", "mlp", GATED_MLP)
SWIGLU_BIAS = under("mlp", "mlp", table(
                    ("linear_fc1.bias",                     "{gate,up}_proj.bias",             GATED_UP),
                    ("linear_fc2.bias",                     "down_proj.bias",                  REPLICATED)))
HEAD_GATE   = table(("self_attention.linear_gate.weight",   "self_attn.g_proj.weight",         COLUMN))
SINKS       = table(("self_attention.core_attention.softmax_offset", "self_attn.sinks",        COLUMN))
ROUTER      = table(("mlp.router.weight",                   "mlp.gate.weight",                 REPLICATED))
ROUTER_BIAS = table(("mlp.router.expert_bias",              "mlp.gate.e_score_correction_bias", REPLICATED))
SHARED      = under("mlp.shared_experts",                   "mlp.shared_experts",              GATED_MLP)
EXPERTS     = experts("mlp.experts.*",                      "mlp.experts.*",                   GATED_MLP)
MOE         = (*ROUTER, *EXPERTS)
MOE_BIASED  = (*MOE, *ROUTER_BIAS, *SHARED)
SHARED_GATED = (*under("mlp.shared_experts",                "mlp.shared_expert",               GATED_MLP),
                *table(("mlp.shared_experts.gate_weight",   "mlp.shared_expert_gate.weight",   REPLICATED)))
MLP_W123    = table(("linear_fc1.weight",                   "{w1,w3}.weight",                  GATED_UP),
                    ("linear_fc2.weight",                   "w2.weight",                       ROW))
W123        = (*table(("mlp.router.weight",                 "block_sparse_moe.gate.weight",    REPLICATED)),
               *experts("mlp.experts.*",                    "block_sparse_moe.experts.*",      MLP_W123))
W123_STACKS = ((".block_sparse_moe.experts.gate_up_proj", ".mlp.experts.gate_up_proj"),
               (".block_sparse_moe.experts.down_proj",    ".mlp.experts.down_proj"))
SHARED_W123 = under("mlp.shared_experts",                   "block_sparse_moe.shared_experts", GATED_MLP)
W123_BIAS   = table(("mlp.router.expert_bias", "block_sparse_moe.e_score_correction_bias",     REPLICATED))
STEP_MOE    = (*table(("mlp.router.weight",                 "moe.gate.weight",                 REPLICATED),
                      ("mlp.router.expert_bias",            "moe.router_bias",                 REPLICATED)),
               *under("mlp.shared_experts",                 "share_expert",                    GATED_MLP),
               *experts("mlp.experts.*", "moe", table(
                    ("linear_fc1.weight",                   "{gate,up}_proj.weight[*]",        GATED_UP),
                    ("linear_fc2.weight",                   "down_proj.weight[*]",             ROW))))
FUSED_GQA   = table(("self_attention.linear_qkv.weight",    "self_attn.qkv_proj.weight",       FUSED_QKV),
                    ("self_attention.linear_proj.weight",   "self_attn.o_proj.weight",         ROW))
FUSED_GLU   = under("mlp", "mlp", table(
                    ("linear_fc1.weight",                   "gate_up_proj.weight",             FUSED_GATED_UP),
                    ("linear_fc2.weight",                   "down_proj.weight",                ROW)))
NORM_BIAS   = table(("input_layernorm.bias",                "input_layernorm.bias",            REPLICATED),
                    ("pre_mlp_layernorm.bias",              "post_attention_layernorm.bias",   REPLICATED))
FINAL_BIAS  = table(("decoder.final_layernorm.bias",        "model.norm.bias",                 REPLICATED))
NORMS_AFTER_ROPE = under("self_attention.core_attention", "self_attn", table(
                    ("q_layernorm.weight",                  "query_layernorm.weight",          REPLICATED),
                    ("k_layernorm.weight",                  "key_layernorm.weight",            REPLICATED)))
# fmt: on


def norms_behind(attention: str, mlp: str, kind: str = "layernorm") -> Rules:
    """The norms after attention and MLP, from the prefixes of these layernorms in HF."""
    return table(
        ("self_attention.linear_proj.post_layernorm.weight", f"{attention}_{kind}.weight", REPLICATED),
        ("mlp.linear_fc2.post_layernorm.weight", f"{mlp}_{kind}.weight", REPLICATED),
    )


NORMS_POST = norms_behind("post_attention", "post_feedforward")
NORMS_BEFORE = table(
    ("input_layernorm.weight", "input_layernorm.weight", REPLICATED),
    ("pre_mlp_layernorm.weight", "pre_feedforward_layernorm.weight", REPLICATED),
)
NORMS_FOUR = (*NORMS_BEFORE, *NORMS_POST)


def around_mtp(
    embedding_norm: str, hidden_norm: str, projection: str, final_norm: str, *, hidden_first: bool = False
) -> Rules:
    """The norms and the projection of an MTP layer, besides its decoder layer, by their HF names.

    ``hidden_first``: the projection multiplies hidden states, then the embedding (``factory/modules/hidden_first.py``).
    """
    projected = "eh_proj.hidden_first.weight" if hidden_first else "eh_proj.weight"
    return table(
        ("enorm.weight", f"{embedding_norm}.weight", REPLICATED),
        ("hnorm.weight", f"{hidden_norm}.weight", REPLICATED),
        (projected, f"{projection}.weight", COLUMN),
        ("final_layernorm.weight", f"{final_norm}.weight", REPLICATED),
    )


MTP_BEHIND = around_mtp("enorm", "hnorm", "eh_proj", "shared_head.norm")
MTP_BESIDE = around_mtp("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")


def mtp_numbered(hf: "PretrainedConfig", place: str, around: Rules, *layer: Rules, offset: int = 0) -> Rules:
    """MTP layers that HF numbers at ``place``, from ``offset`` on: ``layer``, and the modules ``around`` it."""
    rules = (*under("mtp.layers.*", place, around), *under("mtp.layers.*.transformer_layer", place, *layer))
    return numbered(rules, offset=offset, count=counted_mtp_layers(hf))


def mtp_behind(hf: "PretrainedConfig", *layer: Rules) -> Rules:
    """MTP layers that HF numbers after the decoder's layers: ``layer``, norms, projection, and two copied tensors."""
    first = fields.count({"num_hidden_layers": hf.num_hidden_layers}, "num_hidden_layers")
    copies = (
        Rule(mcore, (f"model.layers.{number}.{name}.weight",), VOCAB, copy=True)
        for mcore, name in (
            ("embedding.word_embeddings.weight", "embed_tokens"),
            ("output_layer.weight", "shared_head.head"),
        )
        for number in range(first, first + counted_mtp_layers(hf))
    )
    return (*mtp_numbered(hf, "model.layers.*", MTP_BEHIND, *layer, offset=first), *copies)


def mtp_beside(*layer: Rules) -> Rules:
    """The single MTP layer of Qwen, outside the decoder: ``layer``, and norms and a projection without a number."""
    around = under("mtp.layers.0", "mtp", MTP_BESIDE)
    return (*around, *numbered(under("mtp.layers.*.transformer_layer", "mtp.layers.*", *layer), count=1))


def by_kind(hf: "PretrainedConfig", kinds: Mapping[str, Rules]) -> Rules:
    """For each kind of layer in ``layer_types`` the rules of its layers alone; HF names may be of several kinds."""
    return tuple(
        rule
        for kind, rules in kinds.items()
        for rule in of_layers(
            under("decoder.layers.*", "model.layers.*", rules),
            [layer for layer, name in enumerate(hf.layer_types) if name == kind],
        )
    )


def mlp(up: str, down: str) -> Rules:
    """An MLP without a gate: two linear layers with these HF names, and biases if the model has them."""
    return under(
        "mlp",
        "mlp",
        table(
            ("linear_fc1.weight", f"{up}.weight", COLUMN),
            ("linear_fc1.bias", f"{up}.bias", COLUMN),
            ("linear_fc2.weight", f"{down}.weight", ROW),
            ("linear_fc2.bias", f"{down}.bias", REPLICATED),
        ),
    )


def decoder(*layer: Rules, embedding: Rules = EMBEDDING, final_norm: Rules = FINAL_NORM) -> Rules:
    """A decoder without its head: embedding, the rules ``layer`` for every layer, final norm."""
    return (*embedding, *under("decoder.layers.*", "model.layers.*", *layer), *final_norm)
