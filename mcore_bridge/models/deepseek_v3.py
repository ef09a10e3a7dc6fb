"""DeepSeek V3 and R1, Moonlight: latent attention, and sigmoid-routed experts behind dense layers."""

from mcore_bridge.architecture import AFTER_LAST, Architecture
from mcore_bridge.config.derived_latent import HEAD_DIM
from mcore_bridge.config.moe_layers import COUNTED, LEADING_DENSE, SIGMOID
from mcore_bridge.config.tables import LATENT
from mcore_bridge.models.blocks import MLA, MOE, NORMS, ROUTER_BIAS, SHARED, SWIGLU, decoder

ARCHITECTURE = Architecture(
    model_type="deepseek_v3",
    fields=(*LATENT, *COUNTED, *SIGMOID, HEAD_DIM, LEADING_DENSE),
    rules=lambda hf: decoder(NORMS, MLA, SWIGLU, MOE, ROUTER_BIAS, SHARED),
    ignored=("*.rotary_emb.inv_freq", f"model.layers.{AFTER_LAST}.*"),
)
