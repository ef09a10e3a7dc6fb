"""EXAONE 4: norms only after attention and MLP, norms of queries and keys, no rope in layers without a window.

The MTP layer of EXAONE 4.5 is like the first layer, as in vLLM. EXAONE 4 has none.
"""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import BIAS_NONE, DENSE, NORM_POST, QK_NORMED, WINDOW_OR_NOPE
from mcore_bridge.config.tables.moe import MTP_LIKE_FIRST
from mcore_bridge.models.blocks import GQA, NORMS_POST, QK_NORM, SWIGLU, decoder, mtp_beside

LAYER = (NORMS_POST, GQA, QK_NORM, SWIGLU)
ARCHITECTURE = Architecture(
    model_type="exaone4",
    fields=(*DENSE, *BIAS_NONE, *WINDOW_OR_NOPE, *QK_NORMED, *NORM_POST, *MTP_LIKE_FIRST),
    rules=lambda hf: (*decoder(*LAYER), *mtp_beside(*LAYER)),
    mtp=lambda hf: ("mtp.*",),
)
