"""DeepSeek V3 and R1, Moonlight, Kimi K2: latent attention, and sigmoid-routed experts after dense layers."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import LATENT
from mcore_bridge.config.tables.derived_latent import HEAD_DIM
from mcore_bridge.config.tables.moe import DENSE_FIRST
from mcore_bridge.config.tables.moe_counted import COUNTED, SIGMOID_GROUPED
from mcore_bridge.models.blocks import MLA, MOE_BIASED, NORMS, SWIGLU, decoder, mtp_behind

LAYER = (NORMS, MLA, MOE_BIASED)
ARCHITECTURE = Architecture(
    model_type="deepseek_v3",
    fields=(*LATENT, *COUNTED, *SIGMOID_GROUPED, HEAD_DIM, DENSE_FIRST),
    rules=lambda hf: (*decoder(*LAYER, SWIGLU), *mtp_behind(hf, *LAYER)),
)
