"""Command R: attention and MLP side by side behind one LayerNorm without bias, and a scale of logits."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Require
from mcore_bridge.config.tables import BIAS_ATTENTION, DENSE, INTERLEAVED, QK_PLAIN, WINDOW_NONE, but
from mcore_bridge.config.tables.parallel import NORM_UNBIASED, SCALED_LOGITS
from mcore_bridge.models.blocks import GQA, O_BIAS, ONE_NORM, QKV_BIAS, SWIGLU, decoder

NO_QK_NORM = Require(
    "use_qk_norm", (False, None), "nobody has written its norms, which have other weights in each head"
)
ARCHITECTURE = Architecture(
    model_type="cohere",
    fields=(
        *(*but(DENSE, *INTERLEAVED, *NORM_UNBIASED), *BIAS_ATTENTION, *WINDOW_NONE, *QK_PLAIN),
        *(*SCALED_LOGITS, NO_QK_NORM),
    ),
    rules=lambda hf: decoder(ONE_NORM, GQA, QKV_BIAS, O_BIAS, SWIGLU),
)
