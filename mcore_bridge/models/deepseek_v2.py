"""DeepSeek V2: latent attention, and softmax-routed experts after dense layers.

Logits are as published, and as in transformers 5. Release 4.57 omits the mscale of yarn, so its logits differ.
"""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Ignore
from mcore_bridge.config.tables import LATENT
from mcore_bridge.config.tables.moe import DENSE_FIRST
from mcore_bridge.config.tables.moe_counted import COUNTED, GREEDY
from mcore_bridge.models.blocks import MLA, MOE, NORMS, SHARED, SWIGLU, decoder

ARCHITECTURE = Architecture(
    model_type="deepseek_v2",
    fields=(
        *(*LATENT, *COUNTED, *GREEDY, DENSE_FIRST),
        Ignore("transformers always replaces it by qk_rope_head_dim", ("head_dim",)),
    ),
    rules=lambda hf: decoder(NORMS, MLA, SWIGLU, MOE, SHARED),
)
