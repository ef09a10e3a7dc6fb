"""GLM-4.7-Flash: deepseek_v3, whose layers are listed as dense or sparse."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import LATENT
from mcore_bridge.config.tables.derived_latent import HEAD_DIM
from mcore_bridge.config.tables.moe import MLP_TYPES
from mcore_bridge.config.tables.moe_counted import COUNTED, SIGMOID_GROUPED
from mcore_bridge.models.blocks import MLA, MOE_BIASED, NORMS, SWIGLU, decoder, mtp_behind

LAYER = (NORMS, MLA, MOE_BIASED)
ARCHITECTURE = Architecture(
    model_type="glm4_moe_lite",
    fields=(*LATENT, *COUNTED, *SIGMOID_GROUPED, HEAD_DIM, MLP_TYPES),
    rules=lambda hf: (*decoder(*LAYER, SWIGLU), *mtp_behind(hf, *LAYER)),
)
