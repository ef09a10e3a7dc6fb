"""The shared table of sparse attention: latent attention over the tokens that an indexer selects for each query."""

from mcore_bridge.config.fields import Const, Field, Ignore, Map, Preset, Require
from mcore_bridge.config.megatron_release import Release
from mcore_bridge.config.tables import LATENT, but
from mcore_bridge.config.tables.derived_sparse import ALL_INDEXED
from mcore_bridge.config.tables.moe import MLP_TYPES
from mcore_bridge.config.tables.moe_counted import COUNTED, SIGMOID_GROUPED

SPARSE_RELEASE = Release(
    "0.19.2",
    "earlier releases have no sparse attention in the layer specs of GPT models. Their indexer computes only in bf16, "
    "with a CUDA kernel of fast_hadamard_transform and another epsilon",
)
SPARSE: tuple[Field, ...] = (
    *but(
        LATENT,
        Const("qk_layernorm", True),  # here it decides whether latents have norms
        Require("attention_dropout", (0.0, 0), "megatron-core's sparse attention drops nothing"),
        Const("attention_dropout", 0.0),
    ),
    *(*COUNTED, *SIGMOID_GROUPED, MLP_TYPES, ALL_INDEXED),
    Ignore("transformers makes it qk_rope_head_dim, whatever it says", ("head_dim",)),
    Require("moe_layer_freq", (1, None), "transformers reads mlp_layer_types instead"),
    Const("experimental_attention_variant", "dsa"),
    Map("index_n_heads", "dsa_indexer_n_heads"),
    Map("index_head_dim", "dsa_indexer_head_dim"),
    Map("index_topk", "dsa_indexer_topk"),
    Const("dsa_indexer_scoring_relu", True),
    Const("dsa_indexer_k_norm_epsilon", 1e-6),
    Preset("dsa_indexer_rotate_activation", False),  # orthogonal: it changes scores by rounding only
    Preset("dsa_indexer_loss_coeff", 0.0),  # the indexer's own loss is the trainer's
    Preset("cp_comm_type", "allgather"),  # this attention supports no other
)
"""Latent attention with an indexer in each layer, and sigmoid-routed experts behind dense layers."""
