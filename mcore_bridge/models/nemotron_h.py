"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: each layer is a Mamba-2 mixer, an attention, an MLP or experts."""

from typing import TYPE_CHECKING

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const, Derive, Field, Hf, Ignore, Map, Mcore, Require, count
from mcore_bridge.config.layer_kinds import layers_of
from mcore_bridge.config.tables import BIAS_NONE, DECODER, PLAIN_MLP, QK_PLAIN, WINDOW_NEVER, but, derived, unread
from mcore_bridge.config.tables.mixers import TIME_STEPS, kept_kinds
from mcore_bridge.config.tables.moe import MTP_ON_REQUEST, ROUTED, SCALED
from mcore_bridge.config.tables.moe_counted import SIGMOID_GROUPED
from mcore_bridge.errors import ConfigError
from mcore_bridge.models.blocks_mamba import MAMBA
from mcore_bridge.rules.layout import COLUMN, QKV, REPLICATED, ROW, VOCAB
from mcore_bridge.rules.mapping import Rules, experts, numbered, table, under

if TYPE_CHECKING:
    from transformers import PretrainedConfig


# The config table of Nemotron-H: layers of one half each, Mamba-2 mixers, and no rope.
_KINDS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
"""The kinds of layers in HF, each with its letter in ``layer_kinds``, as in megatron-core's hybrid models."""
_NAMES = {kind: name for name, kind in _KINDS.items()}


def _layers(hf: Hf) -> dict[str, object]:
    names = hf.get("layers_block_type")
    if not isinstance(names, list | tuple) or not names or set(names) - _KINDS.keys():
        raise ConfigError(f"layers_block_type must name one of {sorted(_KINDS)} for each layer, found {names!r}.")
    kinds = tuple(_KINDS[name] for name in names)
    sparse = [int(kind == "E") for kind in kinds]
    return {
        "num_layers": len(kinds),
        "layer_kinds": kinds,
        "moe_layer_freq": sparse,
        "num_moe_experts": count(hf, "n_routed_experts") if any(sparse) else None,
        "moe_ffn_hidden_size": count(hf, "moe_intermediate_size") if any(sparse) else None,
    }


def _layers_back(mcore: Mcore) -> dict[str, object]:
    kinds, experts = kept_kinds(mcore, "layers_block_type"), mcore["num_moe_experts"]
    sparse = [int(kind == "E") for kind in kinds]
    if experts is not None and layers_of(mcore) != sparse:
        raise ConfigError(f"moe_layer_freq must be {sparse}, as layers_block_type says. Remove the override.")
    names: dict[str, object] = {"layers_block_type": [_NAMES[kind] for kind in kinds]}
    if experts is None:
        return names
    return {**names, "n_routed_experts": experts, "moe_intermediate_size": mcore["moe_ffn_hidden_size"]}


def _head_dim(hf: Hf) -> dict[str, object]:
    given, expected = hf.get("attention_head_dim"), hf.get("head_dim")
    if given not in (None, expected):
        raise ConfigError(
            f"attention_head_dim must be head_dim={expected!r}, found {given!r}: transformers reads only head_dim. Set "
            "head_dim to the value of training, and delete attention_head_dim."
        )
    return {}


def _narrow(hf: Hf) -> dict[str, object]:
    narrow = hf.get("moe_latent_size") is not None
    return {"expert_latent_size": count(hf, "moe_latent_size") if narrow else None}


def _mtp_layers(hf: Hf) -> dict[str, object]:
    names = hf.get("mtp_layers_block_type")
    known = names if isinstance(names, list | tuple) else ()
    return {"mtp_kinds": "".join(_KINDS.get(name, "?") for name in known)}


LAYERS = Derive(
    ("layers_block_type", "n_routed_experts", "moe_intermediate_size", "num_hidden_layers"),
    _layers,
    _layers_back,
    ("`layers_block_type` other than `linear_attention`, `full_attention`, `mlp` and `moe`: transformers has no more",),
)
HEAD_DIM = Derive(
    ("attention_head_dim",),
    _head_dim,
    lambda mcore: {},
    ("`attention_head_dim` other than `head_dim`: only `head_dim` is read",),
)
MTP_LAYERS = Derive(("mtp_layers_block_type",), _mtp_layers, lambda mcore: {})
NARROW = Derive(("moe_latent_size",), _narrow, lambda mcore: {"moe_latent_size": mcore["expert_latent_size"]})


MAMBA_FIELDS: tuple[Field, ...] = (
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
EXPERT_FIELDS: tuple[Field, ...] = (
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
    *(*but(DECODER, *OWN), *(entry for entry in EXPERT_FIELDS if entry is not LAYERS), *MAMBA_FIELDS),
    *(*BIAS_NONE, *WINDOW_NEVER, *QK_PLAIN),
    Require("attention_bias", (False,), "transformers never has a bias in attention of this family"),
    Require("mlp_bias", (False,), "megatron-core's add_bias_linear would give attention a bias too"),
    Require("residual_in_fp32", (False,), "transformers always keeps residuals in the dtype of the model"),
    Ignore("they choose how transformers runs the model", ("num_logits_to_keep", "use_mamba_kernels")),
    Ignore("transformers has made lists of kinds of it", ("hybrid_override_pattern", "mtp_hybrid_override_pattern")),
    unread("hidden_dropout", "norm_eps", "rms_norm_eps"),
)


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
