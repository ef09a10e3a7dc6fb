"""The text of MiniMax-M3: indexers of most layers select blocks of keys, and gates of all MLPs are clamped."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const, Map
from mcore_bridge.config.tables import BIAS_NONE, DECODER, QK_NORMED, WINDOW_NEVER, but, published, unread
from mcore_bridge.config.tables.moe import CLAMPED_GATE, MLP_TYPES, MTP_NEVER, ROUTED, SCALED, SIGMOID
from mcore_bridge.config.tables.sparse_attention import BLOCKS
from mcore_bridge.models import blocks, blocks_sparse, minimax_m2

SIZES = (
    *(Map("dense_intermediate_size", "ffn_hidden_size"), Map("intermediate_size", "moe_ffn_hidden_size")),
    Map("shared_intermediate_size", "moe_shared_expert_intermediate_size"),
)
SWITCHES = (
    *published(use_gemma_norm=True, use_qk_norm=True, qk_norm_type="per_head", use_routing_bias=True),
    *published(scoring_func="sigmoid", n_shared_experts=1, attention_output_gate=False),
    unread("moe_intermediate_size", "num_mtp_modules", "rotary_dim"),
)
MOE = (*blocks.W123, *blocks.W123_BIAS, *blocks.SHARED_W123)
ARCHITECTURE = Architecture(
    model_type="minimax_m3_vl_text",
    fields=(
        *but(DECODER, *SIZES, *CLAMPED_GATE, minimax_m2.ROPE, Const("layernorm_zero_centered_gamma", True)),
        *(*BIAS_NONE, *WINDOW_NEVER, *QK_NORMED, *BLOCKS, *ROUTED, *SIGMOID, MLP_TYPES, SCALED, MTP_NEVER, *SWITCHES),
    ),
    rules=lambda hf: (
        *blocks.decoder(blocks.NORMS, blocks.GQA, blocks.QK_NORM, blocks.SWIGLU, MOE),
        *blocks.by_kind(hf, {"minimax_m3_sparse": blocks_sparse.BLOCKS}),
    ),
    mtp=lambda hf: ("mtp.*", "model.mtp.*"),
    aliases=("minimax_m3",),  # in published files of the text alone
    classes=("MiniMaxM3ForCausalLM",),
    reads_as="minimax_m3_vl_text",
    # transformers joins gate and up of dense MLPs and of shared experts, so peft finds neither of them.
    renamed_in_memory=(*blocks.W123_STACKS, (".block_sparse_moe.shared_experts", ".mlp.shared_experts")),
)
