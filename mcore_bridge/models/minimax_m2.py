"""MiniMax-M2: norms over all heads, a part of each head rotated, sigmoid-routed experts under the names of Mixtral."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const
from mcore_bridge.config.tables import BIAS_NONE, DECODER, QK_NORMED_TOGETHER, WINDOW_NONE, but, unread
from mcore_bridge.config.tables.derived_rope import rope
from mcore_bridge.config.tables.moe import MTP_NEVER, NO_SHARED, ONE_SIZE, ROUTED, SIGMOID
from mcore_bridge.models.blocks import GQA, NORMS, QK_NORM, W123, W123_BIAS, W123_STACKS, decoder

ROPE = rope(own=("partial_rotary_factor",))
UNREAD = unread(
    *("attn_type_list", "layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"),
    *("mtp_transformer_layers", "num_mtp_modules", "use_mtp", "qk_norm_type", "use_qk_norm", "use_routing_bias"),
    *("rotary_dim", "scoring_func", "shared_intermediate_size", "shared_moe_mode"),
)
ARCHITECTURE = Architecture(
    model_type="minimax_m2",
    fields=(
        *(*but(DECODER, ONE_SIZE, ROPE), *BIAS_NONE, *WINDOW_NONE, *QK_NORMED_TOGETHER, *ROUTED),
        *(*SIGMOID, *NO_SHARED, MTP_NEVER, UNREAD, Const("moe_router_topk_scaling_factor", None)),
    ),
    rules=lambda hf: decoder(NORMS, GQA, QK_NORM, W123, W123_BIAS),
    # Published files of M2 to M2.7 count MTP layers and hold none. vLLM skips such layers, and has no code for them.
    renamed_in_memory=W123_STACKS,
)
