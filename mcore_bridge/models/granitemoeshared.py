"""Granite 3 (experts): a granitemoe with a shared expert in every layer."""

from dataclasses import replace

from mcore_bridge.config.fields import Const, Map
from mcore_bridge.models import granitemoe
from mcore_bridge.models.blocks import GQA, NORMS, O_BIAS, QKV_BIAS, decoder
from mcore_bridge.rules.layout import FUSED_GATED_UP, ROW
from mcore_bridge.rules.mapping import table, under

# fmt: off
MLP    = table(("linear_fc1.weight", "input_linear.weight",  FUSED_GATED_UP),
               ("linear_fc2.weight", "output_linear.weight", ROW))
SHARED = under("mlp.shared_experts", "shared_mlp", MLP)
# fmt: on
OWN = (
    Map("shared_intermediate_size", "moe_shared_expert_intermediate_size"),
    Const("moe_shared_expert_gate", False),
)
ARCHITECTURE = replace(
    granitemoe.ARCHITECTURE,
    model_type="granitemoeshared",
    fields=(*granitemoe.FIELDS, *OWN),
    rules=lambda hf: decoder(NORMS, GQA, QKV_BIAS, O_BIAS, granitemoe.MOE, SHARED),
)
