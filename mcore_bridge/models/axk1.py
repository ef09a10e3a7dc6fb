"""A.X K1: a deepseek_v3 with a norm after the experts of a layer."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const
from mcore_bridge.config.tables import LATENT
from mcore_bridge.config.tables.derived_latent import HEAD_DIM
from mcore_bridge.config.tables.moe import MLP_TYPES
from mcore_bridge.config.tables.moe_counted import COUNTED, SIGMOID_GROUPED
from mcore_bridge.models.blocks import MLA, MOE_BIASED, NORMS, SWIGLU, decoder
from mcore_bridge.rules.layout import REPLICATED
from mcore_bridge.rules.mapping import of_layers, table

POST_NORM = table(("mlp.post_layernorm.weight", "post_mlp_layernorm.weight", REPLICATED))
ARCHITECTURE = Architecture(
    model_type="axk1",
    fields=(*LATENT, *COUNTED, *SIGMOID_GROUPED, HEAD_DIM, MLP_TYPES, Const("expert_norm", True)),
    rules=lambda hf: decoder(
        *(NORMS, MLA, MOE_BIASED, SWIGLU),
        of_layers(POST_NORM, (layer for layer, kind in enumerate(hf.mlp_layer_types) if kind == "sparse")),
    ),
    # Published files hold this norm in dense layers too, where AXK1PreTrainedModel of transformers ignores it.
    ignored=("*.rotary_emb.inv_freq", "model.layers.*.post_mlp_layernorm.weight"),
    # Published files lack the biases of routers. transformers then leaves them at zero.
    optional=("*.e_score_correction_bias",),
)
