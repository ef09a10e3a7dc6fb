"""gpt-oss: attention sinks, a window in every other layer, biases everywhere, clamped gates, experts in one tensor."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const, Require
from mcore_bridge.config.tables import DECODER, QK_PLAIN, WINDOW_BY_LAYER, but
from mcore_bridge.config.tables.moe import CLAMPED_GATE, NO_SHARED, ONE_SIZE, ROUTED, SOFTMAX_NORMALISED
from mcore_bridge.models.blocks import GQA, NORMS, O_BIAS, QKV_BIAS, SINKS, decoder
from mcore_bridge.rules.layout import INTERLEAVED, REPLICATED, ROW, TRANSPOSED
from mcore_bridge.rules.mapping import experts, table

BIASES = (Const("add_bias_linear", True), Const("add_qkv_bias", True), Const("attention_output_bias", True))
BIASED = Require("attention_bias", (True,), "all published models have it")
# fmt: off
MLP = (*table(("mlp.router.weight", "mlp.router.weight",       REPLICATED),
              ("mlp.router.bias",   "mlp.router.bias",         REPLICATED)),
       *experts("mlp.experts.*", "mlp.experts", table(
              ("linear_fc1.weight", "gate_up_proj[*]",         TRANSPOSED >> INTERLEAVED),
              ("linear_fc1.bias",   "gate_up_proj_bias[*]",    INTERLEAVED),
              ("linear_fc2.weight", "down_proj[*]",            TRANSPOSED >> ROW),
              ("linear_fc2.bias",   "down_proj_bias[*]",       REPLICATED))))
# fmt: on
ARCHITECTURE = Architecture(
    model_type="gpt_oss",
    fields=(
        *(*but(DECODER, ONE_SIZE, *CLAMPED_GATE), *WINDOW_BY_LAYER, *QK_PLAIN, *ROUTED, *SOFTMAX_NORMALISED),
        *(*NO_SHARED, *BIASES, BIASED, Const("softmax_type", "learnable")),
    ),
    rules=lambda hf: decoder(NORMS, GQA, QKV_BIAS, O_BIAS, SINKS, MLP),
)
