"""GLM-4 (9B, of 2024): a rope on pairs of neighbours in half of each head, biases of q, k and v, and gate_up_proj."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import DENSE, INTERLEAVED, QK_PLAIN, WINDOW_NONE, but
from mcore_bridge.models.blocks import FUSED_GLU, GQA, NORMS, QKV_BIAS, decoder
from mcore_bridge.models.glm4 import BIASES, ROPE

ARCHITECTURE = Architecture(
    model_type="glm",
    fields=(*but(DENSE, *INTERLEAVED, ROPE), BIASES, *WINDOW_NONE, *QK_PLAIN),
    rules=lambda hf: decoder(NORMS, GQA, QKV_BIAS, FUSED_GLU),
)
