"""Granite 4: a granite whose layers have a Mamba-2 mixer or attention, and routed and shared experts or an MLP."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const, Require
from mcore_bridge.config.tables import BIAS_ATTENTION, DECODER, QK_PLAIN, SILU_ONLY, WINDOW_NEVER, but, without
from mcore_bridge.config.tables.mixers import LAYERS, MIXER, POSITIONS, SIZES
from mcore_bridge.config.tables.moe import ROUTED, SOFTMAX_NORMALISED
from mcore_bridge.config.tables.scales import MULTIPLIERS
from mcore_bridge.models.blocks import GQA, NORMS, O_BIAS, QKV_BIAS, decoder
from mcore_bridge.models.blocks_mamba import MAMBA
from mcore_bridge.models.granitemoe import ARCHITECTURE as OF_EXPERTS
from mcore_bridge.models.granitemoe import MOE
from mcore_bridge.models.granitemoeshared import MLP, SHARED
from mcore_bridge.rules.mapping import under

DENSE = under("mlp", "shared_mlp", MLP)
MIXERS = under("self_attention", "mamba", MAMBA)
FIELDS = (
    *without(but((*DECODER, *ROUTED), LAYERS, SIZES, POSITIONS, *SILU_ONLY), "position_embedding_type"),
    *(*SOFTMAX_NORMALISED, *MULTIPLIERS, *MIXER, *BIAS_ATTENTION, *WINDOW_NEVER, *QK_PLAIN),
    *(Const("moe_shared_expert_gate", False), Const("mamba_num_groups", 1)),
    Require("mamba_n_groups", (1,), "transformers 4 norms all groups together, and 5 each by itself"),
)
ARCHITECTURE = Architecture(
    model_type="granitemoehybrid",
    fields=FIELDS,
    rules=lambda hf: decoder(
        NORMS, GQA, QKV_BIAS, O_BIAS, MIXERS, *((MOE, SHARED) if hf.num_local_experts else (DENSE,))
    ),
    renamed_in_memory=OF_EXPERTS.renamed_in_memory,
)
