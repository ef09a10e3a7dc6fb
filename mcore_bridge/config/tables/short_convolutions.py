"""The config table of models whose layers have a short convolution or attention, and then an MLP or experts."""

from collections.abc import Callable, Mapping

from torch.nn.functional import silu

from mcore_bridge.config.fields import Const, Derive, Field, Hf, Ignore, Map, Mcore, Preset, Require, count, is_number
from mcore_bridge.config.layer_kinds import layers_of
from mcore_bridge.config.rope_spelling import FULL, SLIDING
from mcore_bridge.config.tables import BIAS_ATTENTION, BIAS_NONE, QK_NORMED, WINDOW_NEVER, derived, unread
from mcore_bridge.config.tables.mixers import kept_kinds
from mcore_bridge.errors import ConfigError, shown

_KINDS = {"conv": "C", "full_attention": "*"}
"""The letters of a convolution and of attention in ``layer_kinds``, by their names in HF."""


def firsts_of(hf: Hf, letters: Mapping[str, str] = _KINDS) -> list[str]:
    """The letter of the first half of each layer, from the letters of names in HF."""
    names, num_layers = hf.get("layer_types"), count(hf, "num_hidden_layers")
    if not isinstance(names, list | tuple) or len(names) != num_layers or set(names) - letters.keys():
        raise ConfigError(
            f"layer_types must name one of {sorted(letters)} for each of the {num_layers} layers, found {shown(names)}."
        )
    return [letters[name] for name in names]


def layers(
    second: Callable[[Hf, int], str],
    back: Callable[[Mcore], dict[str, object]],
    *names: str,
    letters: Mapping[str, str] = _KINDS,
    **mcore: str,
) -> Derive:
    """The entry of the kinds of layers.

    Args:
        second: the letter of the second half of a layer, from the HF config and the number of the layer.
        back: the HF fields ``names`` that decide it, from mcore values.
        names: these fields.
        letters: the letters of mixers and of attention, by their names in HF.
        mcore: a field of megatron-core that is 1 for layers with a letter in their second half, with this letter.
    """

    def forward(hf: Hf) -> dict[str, object]:
        kinds = tuple(first + second(hf, layer) for layer, first in enumerate(firsts_of(hf, letters)))
        marks = {name: [int(letter in kind) for kind in kinds] for name, letter in mcore.items()}
        return {"num_layers": len(kinds), "layer_kinds": kinds, **marks}

    def backward(mcore: Mcore) -> dict[str, object]:
        kinds = kept_kinds(mcore, "layer_types")
        return {"layer_types": [named[kind[0]] for kind in kinds], "num_hidden_layers": len(kinds), **back(mcore)}

    named = {letter: name for name, letter in letters.items()}
    known = " and ".join(f"`{name}`" for name in letters)
    others = f"`layer_types` other than {known}: releases of transformers disagree on them"
    return Derive(("layer_types", "num_hidden_layers", *names), forward, backward, (others,))


def _second(hf: Hf, layer: int) -> str:
    dense = hf.get("num_dense_layers")
    assert isinstance(dense, int)
    return "-" if layer < dense else "E"


def _dense_first_back(mcore: Mcore) -> dict[str, object]:
    kinds, sparse = kept_kinds(mcore, "layer_types"), layers_of(mcore)
    dense = "".join(kinds).count("-")
    if sparse != [int(layer >= dense) for layer in range(len(kinds))]:
        raise ConfigError(
            f"moe_layer_freq must have {dense} dense layers first, and then only sparse ones, found {sparse}. Remove "
            "the override."
        )
    return {"num_dense_layers": dense}


def _mlp_size(hf: Hf) -> dict[str, object]:
    """Unless the config says otherwise, an MLP has two thirds of the given size, rounded up to a multiple."""
    size, factor = count(hf, "intermediate_size"), hf.get("block_ffn_dim_multiplier")
    if not hf.get("block_auto_adjust_ff_dim"):
        return {"ffn_hidden_size": size}
    size = int(2 * size / 3)
    if factor is not None:
        if not is_number(factor):
            raise ConfigError(f"block_ffn_dim_multiplier must be a number or None, found {shown(factor)}.")
        unit = count(hf, "block_multiple_of")
        size = unit * ((int(factor * size) + unit - 1) // unit)
    return {"ffn_hidden_size": size}


def _mlp_size_back(mcore: Mcore) -> dict[str, object]:
    size = mcore["ffn_hidden_size"]
    return {"intermediate_size": size, "block_ff_dim": size, "block_auto_adjust_ff_dim": False}


def _tied_back(mcore: Mcore) -> dict[str, object]:
    return dict.fromkeys(("tie_word_embeddings", "tie_embedding"), mcore["share_embeddings_and_output_weights"])


def _windowed(hf: Hf) -> dict[str, object]:
    """Convolutions stand among layers with a window and full layers."""
    names = hf.get("layer_types")
    plain = [FULL if name == SLIDING else name for name in names] if isinstance(names, list | tuple) else names
    slides = [name if name == SLIDING else FULL for name in names] if isinstance(names, list | tuple) else names
    return {**LAYERS.forward({**hf, "layer_types": plain}), **derived.WINDOWS.forward({**hf, "layer_types": slides})}


def _windowed_back(mcore: Mcore) -> dict[str, object]:
    own, windows = LAYERS.backward(mcore), derived.WINDOWS.backward(mcore)
    kinds, slides = own["layer_types"], windows["layer_types"]
    assert isinstance(kinds, list)
    assert isinstance(slides, list)
    both = [slide if kind == FULL else kind for kind, slide in zip(kinds, slides, strict=True)]
    return {**own, **windows, "layer_types": both}


LAYERS = layers(lambda hf, layer: "-", lambda mcore: {})
DENSE_FIRST = layers(_second, _dense_first_back, "num_dense_layers", moe_layer_freq="E")
MLP_SIZE = Derive(
    ("intermediate_size", "block_ff_dim", "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"),
    _mlp_size,
    _mlp_size_back,
)
TIED = Derive(
    ("tie_word_embeddings", "tie_embedding"),
    lambda hf: {"share_embeddings_and_output_weights": bool(hf.get("tie_word_embeddings"))},
    _tied_back,
)
CONVOLVED: tuple[Field, ...] = (
    *(Map("norm_eps", "layernorm_epsilon"), Map("conv_L_cache", "short_conv_kernel")),
    *(Const("activation_func", silu), *QK_NORMED),
    Require(
        "conv_bias", (False,), "no published model has biases there, and megatron-core's add_bias_linear is for all"
    ),
)
CONVOLUTIONS: tuple[Field, ...] = (
    *(*CONVOLVED, *BIAS_NONE, *WINDOW_NEVER),
    Ignore("transformers has made layer_types of it", ("full_attn_idxs",)),
    Preset("attention_dropout", 0.0),
    unread(
        *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu"),
        *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "use_pos_enc"),
        *("attention_dropout", "hidden_act"),
    ),
)
"""Short convolutions, and attention with norms of queries and keys. The architecture adds the kinds of layers."""
CONVOLUTIONS_AND_WINDOWS: tuple[Field, ...] = (
    *(*CONVOLVED, *BIAS_ATTENTION, unread("hidden_act")),
    Derive(
        ("layer_types", "num_hidden_layers", "sliding_window"),
        *(_windowed, _windowed_back),
        ("`layer_types` other than `conv`, `full_attention` and `sliding_attention`: transformers has no other",),
    ),
    Derive(
        ("use_sandwich_norm",),
        lambda hf: {"norm_placement": "sandwich" if hf.get("use_sandwich_norm") else "pre"},
        lambda mcore: {"use_sandwich_norm": mcore["norm_placement"] == "sandwich"},
    ),
    Derive(
        ("use_attention_gate",),
        lambda hf: {"attention_gate": "head" if hf.get("use_attention_gate") else None},
        lambda mcore: {"use_attention_gate": mcore["attention_gate"] is not None},
    ),
    Const("attention_gate_activation", "sigmoid"),
)
"""Short convolutions, and attention with a window in some layers, perhaps with gates, and perhaps norms behind each."""
