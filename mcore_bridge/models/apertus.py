"""Apertus: no gate in the MLP, but an activation with numbers of each layer (xIELU), and norms of queries and keys."""

from mcore_bridge.architecture import Architecture
from mcore_bridge.config.fields import Const, Require
from mcore_bridge.config.tables import BIAS_ATTENTION, DENSE, PLAIN_MLP, QK_NORMED, WINDOW_NONE, but, published
from mcore_bridge.config.tables.derived import xielu
from mcore_bridge.models.blocks import GQA, O_BIAS, QK_NORM, QKV_BIAS, decoder, mlp
from mcore_bridge.rules.layout import ONE_NUMBER, REPLICATED
from mcore_bridge.rules.mapping import table, under

NORMS = table(
    ("input_layernorm.weight", "attention_layernorm.weight", REPLICATED),
    ("pre_mlp_layernorm.weight", "feedforward_layernorm.weight", REPLICATED),
)
NUMBERS = table(
    *(("alpha_p", "alpha_p", REPLICATED), ("alpha_n", "alpha_n", REPLICATED)),
    *(("beta", "beta", ONE_NUMBER), ("eps", "eps", ONE_NUMBER)),
)
ACTIVATION = under("mlp.activation_func", "mlp.act_fn", NUMBERS)
ONLY_XIELU = Require("hidden_act", ("xielu",), "all published models have this activation")
ARCHITECTURE = Architecture(
    model_type="apertus",
    fields=(
        *but(DENSE, *PLAIN_MLP, ONLY_XIELU, Const("activation_func", xielu)),
        *(*BIAS_ATTENTION, *WINDOW_NONE, *QK_NORMED),
        *published(qk_norm=True, post_norm=False, mlp_bias=False, hidden_dropout=0.0),
    ),
    rules=lambda hf: decoder(NORMS, GQA, QKV_BIAS, O_BIAS, QK_NORM, mlp("up_proj", "down_proj"), ACTIVATION),
)
