"""Granite 3 (experts): a granite with softmax-routed experts in every layer, stacked in two tensors per layer."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Require
from mcore_bridge.config.tables import BIAS_ATTENTION, DECODER, QK_PLAIN, WINDOW_NONE, but
from mcore_bridge.config.tables.moe import NO_SHARED, ONE_SIZE, ROUTED, SOFTMAX_NORMALISED
from mcore_bridge.config.tables.scales import MULTIPLIERS
from mcore_bridge.models.blocks import GQA, NORMS, O_BIAS, QKV_BIAS, decoder
from mcore_bridge.rules.layout import FUSED_GATED_UP, REPLICATED, ROW
from mcore_bridge.rules.mapping import experts, table

# fmt: off
MOE = (*table(("mlp.router.weight", "block_sparse_moe.router.layer.weight", REPLICATED)),
       *experts("mlp.experts.*", "block_sparse_moe", table(
              ("linear_fc1.weight", "input_linear.weight[*]",  FUSED_GATED_UP),
              ("linear_fc2.weight", "output_linear.weight[*]", ROW))))
# fmt: on
FIELDS = (
    *(*but(DECODER, ONE_SIZE), *BIAS_ATTENTION, *WINDOW_NONE, *QK_PLAIN, *MULTIPLIERS),
    *(*ROUTED, *SOFTMAX_NORMALISED),
    Require(
        "position_embedding_type",
        ("rope", None),
        "for other values transformers 4 has no rope, and 5 has one",
    ),
)
ARCHITECTURE = Architecture(
    model_type="granitemoe",
    fields=(*FIELDS, *NO_SHARED),
    rules=lambda hf: decoder(NORMS, GQA, QKV_BIAS, O_BIAS, MOE),
    renamed_in_memory=(
        (".block_sparse_moe.input_linear", ".block_sparse_moe.experts.gate_up_proj"),
        (".block_sparse_moe.output_linear", ".block_sparse_moe.experts.down_proj"),
    ),
)
