"""Youtu-LLM: the latent attention of deepseek_v3, with a dense MLP in every layer."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const, Ignore
from mcore_bridge.config.tables import LATENT
from mcore_bridge.config.tables.derived_latent import HEAD_DIM
from mcore_bridge.models.blocks import MLA, NORMS, SWIGLU, decoder

INITIAL = Ignore("embeddings are drawn with initializer_range", ("embedding_initializer_range",))
ARCHITECTURE = Architecture(
    model_type="youtu",
    fields=(*LATENT, HEAD_DIM, INITIAL, Const("num_moe_experts", None)),
    rules=lambda hf: decoder(NORMS, MLA, SWIGLU),
)
