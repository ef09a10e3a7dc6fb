"""Tables of weight rules of Inkling: convolutions beside residuals, scores by distance, and scored shared experts."""

from mcore_bridge.rules.layout import COLUMN, REPLICATED, Rearrange
from mcore_bridge.rules.mapping import table, under

_ROWS = Rearrange("shared (tp n) m", "tp shared n m")
_COLUMNS = Rearrange("shared n (tp m)", "tp shared n m")

# fmt: off
EMBEDDING_NORM = table(("embedding.layernorm.weight",        "model.embed_tokens.embed_norm.weight", REPLICATED))
RELATIVE     = table(("self_attention.linear_relative.weight",  "self_attn.r_proj.weight",           COLUMN),
                     ("self_attention.core_attention.profiles", "self_attn.rel_logits_proj.proj",    REPLICATED))
CONVOLUTIONS = table(("self_attention.k_conv.weight",        "self_attn.k_sconv.conv1d.weight",      REPLICATED),
                     ("self_attention.v_conv.weight",        "self_attn.v_sconv.conv1d.weight",      REPLICATED),
                     ("self_attn_bda.conv.weight",           "attn_sconv.conv1d.weight",             REPLICATED),
                     ("mlp_bda.conv.weight",                 "mlp_sconv.conv1d.weight",              REPLICATED))
SCALES       = table(("mlp_bda.scale",                       "mlp.global_scale",                     REPLICATED),
                     ("mlp.router.global_scale",             "mlp.gate.global_scale",                REPLICATED))
SHARED       = under("mlp.shared_experts", "mlp.shared_experts", table(
                     ("gate",                                "gate_proj",                            _ROWS),
                     ("up",                                  "up_proj",                              _ROWS),
                     ("down",                                "down_proj",                            _COLUMNS)))
# fmt: on
