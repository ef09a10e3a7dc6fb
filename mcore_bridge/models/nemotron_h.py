"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: each layer is a Mamba-2 mixer, an attention, an MLP or experts."""

from typing import TYPE_CHECKING

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables.hybrid import FIELDS
from mcore_bridge.models.blocks_mamba import MAMBA
from mcore_bridge.rules.layout import COLUMN, QKV, REPLICATED, ROW, VOCAB
from mcore_bridge.rules.mapping import Rules, experts, table, under

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# fmt: off
AROUND    = table(("embedding.word_embeddings.weight", "backbone.embeddings.weight",   VOCAB),
                  ("decoder.final_layernorm.weight",   "backbone.norm_f.weight",       REPLICATED))
ATTENTION = table(("linear_qkv.weight",                "{q,k,v}_proj.weight",          QKV),
                  ("linear_proj.weight",               "o_proj.weight",                ROW))
MLP       = table(("linear_fc1.weight",                "up_proj.weight",               COLUMN),
                  ("linear_fc2.weight",                "down_proj.weight",             ROW))
EXPERTS   = (*table(("router.weight",                  "gate.weight",                  REPLICATED),
                    ("router.expert_bias",             "gate.e_score_correction_bias", REPLICATED),
                    ("fc1_latent_proj.weight",         "fc1_latent_proj.weight",       REPLICATED),
                    ("fc2_latent_proj.weight",         "fc2_latent_proj.weight",       REPLICATED)),
             *under("shared_experts", "shared_experts", MLP), *experts("experts.*", "experts.*", MLP))
# fmt: on
MIXERS = (*under("self_attention", "mixer", MAMBA, ATTENTION), *under("mlp", "mixer", MLP, EXPERTS))


def norms(hf: "PretrainedConfig") -> Rules:
    """The norm of each layer: it is before attention or a mixer, or before an MLP."""
    kinds = enumerate(hf.layers_block_type)
    slots = ((layer, "pre_mlp" if kind in ("mlp", "moe") else "input") for layer, kind in kinds)
    rows = ((f"{layer}.{slot}_layernorm.weight", f"{layer}.norm.weight", REPLICATED) for layer, slot in slots)
    return under("decoder.layers", "backbone.layers", table(*rows))


ARCHITECTURE = Architecture(
    model_type="nemotron_h",
    fields=FIELDS,
    rules=lambda hf: (*AROUND, *norms(hf), *under("decoder.layers.*", "backbone.layers.*", MIXERS)),
    # Layers for multi-token prediction, which NemotronHPreTrainedModel of transformers does not build either.
    ignored=("*.rotary_emb.inv_freq", "mtp.*"),
    renamed_in_memory=(("backbone.", "model."),),
)
