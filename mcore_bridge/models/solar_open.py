"""Solar Open: a glm4_moe with experts in every layer, and no norms of queries and keys."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Ignore, Require
from mcore_bridge.config.tables import DECODER, QK_PLAIN, WINDOW_NONE, but
from mcore_bridge.config.tables.derived import biases
from mcore_bridge.config.tables.moe import GROUPS, ROUTED, SCALED, SIGMOID, shared_experts
from mcore_bridge.models.blocks import GQA, MOE_BIASED, NORMS, QKV_BIAS, decoder

NO_DENSE = Ignore("no layer has a dense MLP", ("intermediate_size",))
ALL_SPARSE = Require("first_k_dense_replace", (0, None), "transformers gives experts to every layer")
ARCHITECTURE = Architecture(
    model_type="solar_open",
    fields=(
        *(*but(DECODER, NO_DENSE), biases("attention_bias", None, None), *WINDOW_NONE, *QK_PLAIN),
        *(*ROUTED, *SIGMOID, SCALED, GROUPS, ALL_SPARSE, shared_experts("n_shared_experts")),
    ),
    rules=lambda hf: decoder(NORMS, GQA, QKV_BIAS, MOE_BIASED),
)
