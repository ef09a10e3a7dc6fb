"""HunYuan-A13B: norms of queries and keys after the rope, softmax-routed experts and a shared one in each layer."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const
from mcore_bridge.config.tables import BIAS_ATTENTION, DECODER, QK_NORMED_AFTER_ROPE, WINDOW_NONE, but, unread
from mcore_bridge.config.tables.derived_rope import ALPHA_ROPE
from mcore_bridge.config.tables.moe import ROUTED, SOFTMAX_NORMALISED, number, one_size
from mcore_bridge.models.blocks import EXPERTS, GATED_MLP, GQA, NORMS, NORMS_AFTER_ROPE, O_BIAS, QKV_BIAS, decoder
from mcore_bridge.models.hunyuan_v1_dense import UNREAD
from mcore_bridge.rules.layout import REPLICATED
from mcore_bridge.rules.mapping import table, under

ONE_SIZE = one_size("ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
COUNTS = (number("num_experts", "num_moe_experts"), number("moe_topk", "moe_router_topk", "num_experts_per_tok"))
SHARED = under("mlp.shared_experts", "mlp.shared_mlp", GATED_MLP)
ROUTER = table(("mlp.router.weight", "mlp.gate.wg.weight", REPLICATED))
ARCHITECTURE = Architecture(
    model_type="hunyuan_v1_moe",
    fields=(
        *(*but(DECODER, ALPHA_ROPE, ONE_SIZE), *BIAS_ATTENTION, *WINDOW_NONE, *QK_NORMED_AFTER_ROPE),
        *(*but(ROUTED, *COUNTS), *SOFTMAX_NORMALISED, Const("moe_router_dtype", "fp32"), unread(*UNREAD)),
    ),
    rules=lambda hf: decoder(NORMS, GQA, QKV_BIAS, O_BIAS, NORMS_AFTER_ROPE, ROUTER, EXPERTS, SHARED),
)
