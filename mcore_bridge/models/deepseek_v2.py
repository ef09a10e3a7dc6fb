"""DeepSeek V2: latent attention, and softmax-routed experts after dense layers.

As published, and in transformers 5: 4.57 leaves the mscale of yarn out, and so has other logits.
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
        Ignore("transformers makes it qk_rope_head_dim, whatever it says", ("head_dim",)),
    ),
    rules=lambda hf: decoder(NORMS, MLA, SWIGLU, MOE, SHARED),
)
