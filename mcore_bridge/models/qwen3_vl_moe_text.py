"""Qwen3-VL (experts), the text model: a qwen3_moe without windows, all experts of a layer in one transposed tensor."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Require
from mcore_bridge.config.tables import BIAS_ATTENTION, DECODER, QK_NORMED, WINDOW_NONE, but
from mcore_bridge.config.tables.derived_rope import MULTIMODAL_ROPE
from mcore_bridge.config.tables.moe import EXPERT_SIZE, NO_SHARED, ROUTED, SOFTMAX_NORMALISED, SPARSE_STEP
from mcore_bridge.models.blocks import GQA, NORMS, O_BIAS, QK_NORM, QKV_BIAS, ROUTER, SWIGLU, decoder
from mcore_bridge.rules.layout import FUSED_GATED_UP, ROW, TRANSPOSED
from mcore_bridge.rules.mapping import experts, table

OWN = (
    Require("norm_topk_prob", (True, None), "transformers always normalises the weights of experts"),
    Require("use_sliding_window", (False, None), "the text model of transformers has no windows"),
)
# As in published files. transformers 5 writes them transposed: see rules/variants.py.
# fmt: off
EXPERTS = experts("mlp.experts.*", "mlp.experts", table(
    ("linear_fc1.weight", "gate_up_proj[*]", TRANSPOSED >> FUSED_GATED_UP),
    ("linear_fc2.weight", "down_proj[*]",    TRANSPOSED >> ROW)))
# fmt: on
ARCHITECTURE = Architecture(
    model_type="qwen3_vl_moe_text",
    fields=(
        *(*but(DECODER, MULTIMODAL_ROPE), *BIAS_ATTENTION, *WINDOW_NONE, *QK_NORMED),
        *(*ROUTED, *SOFTMAX_NORMALISED, *NO_SHARED, SPARSE_STEP, EXPERT_SIZE, *OWN),
    ),
    rules=lambda hf: decoder(NORMS, GQA, QKV_BIAS, O_BIAS, QK_NORM, SWIGLU, ROUTER, EXPERTS),
)
