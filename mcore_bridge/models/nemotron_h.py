"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: each layer is a Mamba-2 mixer, an attention, an MLP or experts."""

from typing import TYPE_CHECKING

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.tables.hybrid import FIELDS
from mcore_bridge.models.blocks_mamba import MAMBA
from mcore_bridge.rules.layout import COLUMN, QKV, REPLICATED, ROW, VOCAB
from mcore_bridge.rules.mapping import Rules, experts, numbered, table, under

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
MTP_FIRST = table(("enorm.weight",                     "enorm.weight",                REPLICATED),
                  ("hnorm.weight",                     "hnorm.weight",                REPLICATED),
                  ("eh_proj.weight",                   "eh_proj.weight",              COLUMN))
MTP_LAST  = table(("final_layernorm.weight",           "final_layernorm.weight",      REPLICATED))
# fmt: on
MIXERS = (*under("self_attention", "mixer", MAMBA, ATTENTION), *under("mlp", "mixer", MLP, EXPERTS))

_SLOTS = (
    ("input_layernorm.weight", under("self_attention", "mixer", ATTENTION)),
    ("pre_mlp_layernorm.weight", under("mlp", "mixer", MLP, EXPERTS)),
)
"""The halves of the layer within an MTP layer: the norm of each, and its rules."""


def norms(hf: "PretrainedConfig") -> Rules:
    """The norm of each layer: it is before attention or a mixer, or before an MLP."""
    kinds = enumerate(hf.layers_block_type)
    slots = ((layer, "pre_mlp" if kind in ("mlp", "moe") else "input") for layer, kind in kinds)
    rows = ((f"{layer}.{slot}_layernorm.weight", f"{layer}.norm.weight", REPLICATED) for layer, slot in slots)
    return under("decoder.layers", "backbone.layers", table(*rows))


def mtp(hf: "PretrainedConfig") -> Rules:
    """MTP layers. HF numbers halves: layer 1, if it has two halves, is ``mtp.layers.2`` and ``mtp.layers.3``."""
    halves, count = len(hf.mtp_layers_block_type or ()), hf.num_nextn_predict_layers or 0
    rules: list[Rules] = []
    for half in range(halves if halves <= len(_SLOTS) else 0):  # other kinds are refused, if they are requested
        norm, mixer = _SLOTS[half]
        inner = (*table((norm, "norm.weight", REPLICATED)), *mixer)
        own = under("mtp.layers.*.transformer_layer", "mtp.layers.*", inner)
        around = (*(MTP_FIRST if half == 0 else ()), *(MTP_LAST if half == halves - 1 else ()))
        own += under("mtp.layers.*", "mtp.layers.*", around)
        rules.append(numbered(own, offset=half, stride=halves, count=count))
    return tuple(rule for group in rules for rule in group)


ARCHITECTURE = Architecture(
    model_type="nemotron_h",
    fields=FIELDS,
    rules=lambda hf: (*AROUND, *norms(hf), *under("decoder.layers.*", "backbone.layers.*", MIXERS), *mtp(hf)),
    # Layers that the config does not count, or of kinds that we do not build.
    mtp=lambda hf: ("mtp.*",),
    renamed_in_memory=(("backbone.", "model."),),
)
