"""Config tables of families in which attention and MLP read the same input ("parallel" blocks)."""

from mcore_bridge.config.fields import Const, Derive, Field, Hf, Map, Mcore, Require
from mcore_bridge.config.tables import layer_norm


def _parallel(hf: Hf) -> dict[str, object]:
    return {"parallel_norms": 2 if hf.get("use_parallel_residual") else None}


def _parallel_back(mcore: Mcore) -> dict[str, object]:
    return {"use_parallel_residual": mcore["parallel_norms"] is not None}


ONE_NORM: tuple[Field, ...] = (Const("parallel_norms", 1),)
"""Attention and MLP read the same norm of the layer's input."""
PARALLEL_OR_NOT = Derive(("use_parallel_residual",), _parallel, _parallel_back)
"""Either attention and MLP each read a norm of the layer's input, or the MLP comes after attention as usual."""
NORM_UNBIASED: tuple[Field, ...] = (*layer_norm("layer_norm_eps"), Const("norm_bias", False), *ONE_NORM)
"""``ONE_NORM`` for a LayerNorm without a bias."""
SCALED_LOGITS: tuple[Field, ...] = (Map("logit_scale", "logit_scale"),)
BIAS_EVERYWHERE: tuple[Field, ...] = (
    *(Const("add_bias_linear", True), Const("add_qkv_bias", True), Const("attention_output_bias", True)),
)
OWN_HEAD: tuple[Field, ...] = (
    Const("share_embeddings_and_output_weights", False),
    Require("tie_word_embeddings", (False,), "nobody has written a tied head with another name, or with a bias"),
)
"""For an LM head with another name than ``lm_head.weight``, or with a bias."""
