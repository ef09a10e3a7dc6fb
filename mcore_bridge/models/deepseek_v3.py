"""DeepSeek V3."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Ignore
from mcore_bridge.config.tables import BASE, LATENT, MATHS, SIZES, TRAINING, WINDOW_NONE
from mcore_bridge.models.blocks import MLA, NORMS, SWIGLU, decoder

ARCHITECTURE = Architecture(
    model_type="deepseek_v3",
    fields=(
        *BASE,
        *SIZES,
        *MATHS,
        *TRAINING,
        *LATENT,
        *WINDOW_NONE,
        Ignore(
            "todo",
            (
                "n_group",
                "topk_group",
                "num_experts_per_tok",
                "n_routed_experts",
                "moe_intermediate_size",
                "n_shared_experts",
                "first_k_dense_replace",
                "norm_topk_prob",
                "routed_scaling_factor",
                "output_router_logits",
                "num_nextn_predict_layers",
            ),
        ),
    ),
    rules=lambda hf: decoder(NORMS, MLA, SWIGLU),
    ignored=("*.rotary_emb.inv_freq",),
)
