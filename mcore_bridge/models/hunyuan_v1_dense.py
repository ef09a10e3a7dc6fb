"""HunYuan, dense: norms of queries and keys after the rope, whose base is multiplied by a power of alpha."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Ignore, Require
from mcore_bridge.config.tables import BIAS_ATTENTION, DENSE, QK_NORMED_AFTER_ROPE, WINDOW_NONE, but
from mcore_bridge.config.tables.derived_rope import ALPHA_ROPE
from mcore_bridge.models.blocks import GQA, NORMS, NORMS_AFTER_ROPE, O_BIAS, QKV_BIAS, SWIGLU, decoder

FIXED = (("use_qk_norm", True), ("use_cla", False), ("mlp_bias", False), ("norm_type", "rms"), ("num_experts", 1))
UNREAD = (
    *("eod_token_id", "pad_id", "im_start_id", "im_end_id", "im_newline_id", "mask_init_id"),
    *("text_start_id", "text_end_id", "org_vocab_size", "attention_head_dim", "cla_share_factor", "dense_list"),
    *("add_classification_head", "class_num", "pool_type", "use_rotary_pos_emb"),
)
REQUIRED = tuple(Require(name, (value,), "transformers computes nothing else") for name, value in FIXED)
ARCHITECTURE = Architecture(
    model_type="hunyuan_v1_dense",
    fields=(
        *(*but(DENSE, ALPHA_ROPE), *BIAS_ATTENTION, *WINDOW_NONE, *QK_NORMED_AFTER_ROPE, *REQUIRED),
        Ignore("transformers does not read it", UNREAD),
    ),
    rules=lambda hf: decoder(NORMS, GQA, QKV_BIAS, O_BIAS, NORMS_AFTER_ROPE, SWIGLU),
)
