"""The config table of Nemotron-H: layers of one half each, Mamba-2 mixers, and no rope."""

from mcore_bridge.config.fields import Const, Field, Ignore, Map, Require
from mcore_bridge.config.tables import BIAS_NONE, DECODER, PLAIN_MLP, QK_PLAIN, WINDOW_NEVER, but, derived, unread
from mcore_bridge.config.tables.derived_hybrid import HEAD_DIM, LAYERS, MTP_LAYERS, NARROW, TIME_STEPS
from mcore_bridge.config.tables.moe import MTP_ON_REQUEST, ROUTED, SCALED
from mcore_bridge.config.tables.moe_counted import SIGMOID_GROUPED

MAMBA: tuple[Field, ...] = (
    *(Map("ssm_state_size", "mamba_state_dim"), Map("mamba_head_dim", "mamba_head_dim")),
    *(Map("mamba_num_heads", "mamba_num_heads"), Map("n_groups", "mamba_num_groups")),
    *(Map("conv_kernel", "mamba_conv_kernel"), TIME_STEPS),
    Require("mamba_hidden_act", ("silu",), "megatron-core's kernel has this activation"),
    Require("use_conv_bias", (True,), "megatron-core's checkpoints have this bias"),
    Require("use_bias", (False,), "megatron-core's mixer has no bias in its projections"),
    Ignore(
        "transformers raises smaller time steps to it, but megatron-core's kernel, the engines and we do not",
        ("time_step_min",),
    ),
    Ignore("initial values are megatron-core's", ("time_step_max", "time_step_floor", "rescale_prenorm_residual")),
    Ignore("the result does not depend on it", ("chunk_size",)),
    Ignore("it only affects how inference engines keep a state", ("mamba_ssm_cache_dtype",)),
    unread("mamba_proj_bias", "expand", "time_step_rank"),
)
EXPERTS: tuple[Field, ...] = (
    *(*but(ROUTED, LAYERS), *SIGMOID_GROUPED, SCALED, NARROW),
    Map("moe_shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    Const("moe_shared_expert_gate", False),
    Require(
        "n_shared_experts",
        (1,),
        "transformers builds one shared expert of the whole size, and vLLM builds this number of experts",
    ),
    Ignore("it chooses how programs of training overlap work", ("moe_shared_expert_overlap",)),
    *(MTP_ON_REQUEST, MTP_LAYERS),
)
NO_ROPE: tuple[Field, ...] = (
    Const("position_embedding_type", "none"),
    Ignore("no layer has a rope", ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")),
)
OWN: tuple[Field, ...] = (
    Map("layer_norm_epsilon", "layernorm_epsilon"),
    derived.activation("mlp_hidden_act", "hidden_act"),
    Const("share_embeddings_and_output_weights", False),
    Require("tie_word_embeddings", (False,), "transformers always has an untied head in this family"),
    *(*PLAIN_MLP, *NO_ROPE, HEAD_DIM, LAYERS),
)
FIELDS: tuple[Field, ...] = (
    *(*but(DECODER, *OWN), *(entry for entry in EXPERTS if entry is not LAYERS), *MAMBA),
    *(*BIAS_NONE, *WINDOW_NEVER, *QK_PLAIN),
    Require("attention_bias", (False,), "transformers never has a bias in attention of this family"),
    Require("mlp_bias", (False,), "megatron-core's add_bias_linear would give attention a bias too"),
    Require("residual_in_fp32", (False,), "transformers always keeps residuals in the dtype of the model"),
    Ignore("they choose how transformers runs the model", ("num_logits_to_keep", "use_mamba_kernels")),
    Ignore("transformers has made lists of kinds of it", ("hybrid_override_pattern", "mtp_hybrid_override_pattern")),
    unread("hidden_dropout", "norm_eps", "rms_norm_eps"),
)
