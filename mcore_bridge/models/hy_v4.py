"""Hunyuan 4 (Hy4): residual streams, latent attention with sinks and gates to selected keys, and routed experts.

Names in files are those of publishers, which engines read. transformers reads them, too, but writes others: its names
of streams have their words in another order, and it writes gates of MLPs as ``linear_gate``.
"""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const, Ignore, Map
from mcore_bridge.config.tables import SILU_ONLY, but, published
from mcore_bridge.config.tables.by_layer import ELEMENT_GATES
from mcore_bridge.config.tables.moe import MTP_NEVER
from mcore_bridge.config.tables.scales import UNMIXED
from mcore_bridge.config.tables.sparse_attention import SELECTED
from mcore_bridge.models.blocks import MOE_BIASED, NORMS, SHARED, SWIGLU, decoder
from mcore_bridge.models.blocks_sparse import INDEXER, MLA_IN_HALVES, merge, streams
from mcore_bridge.rules.layout import COLUMN
from mcore_bridge.rules.mapping import respelled, second_names, table, under

ATTENTION = table(
    ("self_attention.linear_gate.weight", "self_attn.linear_gate.weight", COLUMN),
    ("self_attention.core_attention.softmax_offset", "self_attn.learnable_sink_param", COLUMN),
)
LAYER = (NORMS, MLA_IN_HALVES, ATTENTION, INDEXER, SWIGLU, MOE_BIASED)
STREAMS = streams("hc_attn_layer.hc_pre.hc_", "hc_mlp_layer.hc_pre.hc_")
WRITTEN_GATES = tuple((f"{mlp}.gate_proj.", f"{mlp}.linear_gate.") for mlp in ("mlp", "mlp.shared_experts"))
WRITTEN = (
    streams("hc_pre.hc_attn_layer.hc_", "hc_pre.hc_mlp_layer.hc_"),
    respelled((*SWIGLU, *SHARED), WRITTEN_GATES),
)
"""What has another name if transformers writes it."""
ARCHITECTURE = Architecture(
    model_type="hy_v4",
    fields=but(
        (*SELECTED, *ELEMENT_GATES, *UNMIXED),
        *(MTP_NEVER, Map("swiglu_limit", "expert_glu_limit"), Const("limits_before_activation", True)),
        Ignore("it only decides initial values", ("learnable_sink_init",)),
        Ignore("the loss of MTP layers is the trainer's", ("mtp_loss_factor",)),
        *published(gated_mla=True, gating_type="elementwise", learnable_sink=True, use_dsa=True, enable_ihc=True),
        *(*published(enable_lm_head_fp32=True), *SILU_ONLY),
    ),
    rules=lambda hf: (
        *(*decoder(*LAYER, STREAMS), *merge("model.hc_head.hc_head_")),
        *second_names(
            (*under("decoder.layers.*", "model.layers.*", *WRITTEN), *merge("model.hc_pre.hc_head.hc_head_"))
        ),
    ),
    mtp=lambda hf: ("model.mtp_layers.*",),
    expert_format="fused",
    renamed_in_memory=((".self_attn.linear_gate", ".self_attn.gate_proj"),),
)
