"""Falcon-H1: a llama with a Mamba-2 mixer beside the attention of each layer, and multipliers everywhere."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables import BIAS_ATTENTION, DENSE, QK_PLAIN, SILU_ONLY, WINDOW_NEVER, but
from mcore_bridge.config.tables.attention_and_mixer import BESIDE, LAYERS
from mcore_bridge.models.blocks import EMBEDDING, GATED_MLP, GQA, O_BIAS, ONE_NORM, QKV_BIAS
from mcore_bridge.models.blocks_mamba import MAMBA
from mcore_bridge.rules.layout import REPLICATED
from mcore_bridge.rules.mapping import table, under

# fmt: off
MLP_NORM   = table(("pre_mlp_layernorm.weight",       "pre_ff_layernorm.weight",      REPLICATED))
FINAL_NORM = table(("decoder.final_layernorm.weight", "model.final_layernorm.weight", REPLICATED))
# fmt: on
MIXER, MLP = under("self_attention.mixer", "mamba", MAMBA), under("mlp", "feed_forward", GATED_MLP)
LAYER = under("decoder.layers.*", "model.layers.*", ONE_NORM, MLP_NORM, GQA, QKV_BIAS, O_BIAS, MIXER, MLP)
ARCHITECTURE = Architecture(
    model_type="falcon_h1",
    fields=(*but(DENSE, LAYERS, *SILU_ONLY), *BESIDE, *BIAS_ATTENTION, *WINDOW_NEVER, *QK_PLAIN),
    rules=lambda hf: (*EMBEDDING, *LAYER, *FINAL_NORM),
)
