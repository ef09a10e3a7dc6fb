"""Entries of config tables that no single field decides: pairs of functions, forward and back, next to each other."""

import functools
from collections.abc import Callable

import torch.nn.functional as F  # noqa: N812  (the name by which all of PyTorch knows it)

from mcore_bridge.config.fields import Derive, Hf, Mcore, count
from mcore_bridge.config.rope import Rope, head_dim, rope_from
from mcore_bridge.config.spelling import spelled
from mcore_bridge.errors import ConfigError

GELU_TANH = functools.partial(F.gelu, approximate="tanh")
_ACTIVATIONS: dict[str, Callable[..., object]] = {  # the first name of a function is the one that is written back
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": GELU_TANH,
    "gelu_new": GELU_TANH,
    "relu": F.relu,
}


def _activation(hf: Hf) -> dict[str, object]:
    name = hf.get("hidden_act")
    if name not in _ACTIVATIONS:
        raise ConfigError(
            f"hidden_act must be one of {sorted(_ACTIVATIONS)}, which megatron-core has too; found {name!r}."
        )
    return {"activation_func": _ACTIVATIONS[str(name)]}


def _hidden_act(mcore: Mcore) -> dict[str, object]:
    found = mcore["activation_func"]
    for name, function in _ACTIVATIONS.items():
        if _identity(function) == _identity(found):
            return {"hidden_act": name}
    raise ConfigError(f"activation_func must be one that HF has a name for ({sorted(_ACTIVATIONS)}), found {found!r}.")


def _identity(function: object) -> tuple[object, ...]:
    """Equal for equal functions; two partials of the same call are not equal by themselves."""
    if isinstance(function, functools.partial):
        return (function.func, function.args, tuple(function.keywords.items()))
    return (function,)


def _heads(hf: Hf) -> dict[str, object]:
    heads = count(hf, "num_attention_heads")
    groups = heads if hf.get("num_key_value_heads") is None else count(hf, "num_key_value_heads")
    if heads % groups:
        raise ConfigError(f"num_attention_heads={heads} must be a multiple of num_key_value_heads={groups}.")
    return {"num_attention_heads": heads, "num_query_groups": groups, "kv_channels": head_dim(hf)}


def _heads_back(mcore: Mcore) -> dict[str, object]:
    return {
        "num_attention_heads": mcore["num_attention_heads"],
        "num_key_value_heads": mcore["num_query_groups"],
        "head_dim": mcore["kv_channels"],
    }


def _vocab(hf: Hf) -> dict[str, object]:
    size = count(hf, "vocab_size")
    return {"vocab_size": size, "hf_vocab_size": size}


def _vocab_back(mcore: Mcore) -> dict[str, object]:
    return {"vocab_size": mcore.get("hf_vocab_size", mcore["vocab_size"])}


def _rope(hf: Hf) -> dict[str, object]:
    rope = rope_from(hf)
    return {"hf_rope": rope, "rotary_base": rope.theta}


def _rope_back(mcore: Mcore) -> dict[str, object]:
    rope = mcore["hf_rope"]
    assert isinstance(rope, Rope)
    return spelled(rope.parameters)


def _biases(hf: Hf) -> dict[str, object]:
    attention, mlp = hf.get("attention_bias", False), hf.get("mlp_bias", False)
    if mlp and not attention:
        raise ConfigError(
            "mlp_bias=True must come with attention_bias=True: megatron-core's add_bias_linear gives a bias to the "
            "MLP and to the attention output together. Set attention_bias=True with zero biases."
        )
    return {"add_bias_linear": mlp, "add_qkv_bias": attention, "attention_output_bias": attention}


def _biases_back(mcore: Mcore) -> dict[str, object]:
    attention, mlp = mcore["add_qkv_bias"], mcore["add_bias_linear"]
    if attention != mcore.get("attention_output_bias", mlp) or (mlp and not attention):
        raise ConfigError(
            f"HF has one attention_bias for q, k, v and output; found add_qkv_bias={attention}, "
            f"add_bias_linear={mlp}, attention_output_bias={mcore.get('attention_output_bias')}. Remove the override."
        )
    return {"attention_bias": attention, "mlp_bias": mlp}


def _attention_bias_back(mcore: Mcore) -> dict[str, object]:
    fields = _biases_back(mcore)
    if fields.pop("mlp_bias"):
        raise ConfigError(
            "add_bias_linear must be False: this architecture has no bias in its MLP. Remove the override."
        )
    return fields


def _window(hf: Hf) -> dict[str, object]:
    window = hf.get("sliding_window")
    return {"window_size": None if window is None else _mcore_window(hf), "window_attn_skip_freq": None}


def _window_back(mcore: Mcore) -> dict[str, object]:
    if mcore["window_attn_skip_freq"] is not None:
        raise ConfigError("window_attn_skip_freq must be None: this architecture slides in every layer or in none.")
    return {"sliding_window": _hf_window(mcore["window_size"])}


def _window_if_used(hf: Hf) -> dict[str, object]:
    return _window(hf if hf.get("use_sliding_window") else {**hf, "sliding_window": None})


def _window_if_used_back(mcore: Mcore) -> dict[str, object]:
    fields = _window_back(mcore)
    return {**fields, "use_sliding_window": fields["sliding_window"] is not None}


def _windows(hf: Hf) -> dict[str, object]:
    kinds, num_layers = hf.get("layer_types"), count(hf, "num_hidden_layers")
    if kinds is None and not hf.get("use_sliding_window"):  # older configs say nothing more
        kinds = ["full_attention"] * num_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ConfigError(f"layer_types must name the attention of each of the {num_layers} layers, found {kinds!r}.")
    if unknown := sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"}):
        raise ConfigError(f"layer_types must be 'full_attention' or 'sliding_attention', found also {unknown}.")
    slides = [int(kind == "sliding_attention") for kind in kinds]
    if not any(slides):
        return {"window_size": None, "window_attn_skip_freq": None}
    return {"window_size": _mcore_window(hf), "window_attn_skip_freq": None if all(slides) else slides}


def _windows_back(mcore: Mcore) -> dict[str, object]:
    num_layers, window, skip = mcore["num_layers"], _hf_window(mcore["window_size"]), mcore["window_attn_skip_freq"]
    assert isinstance(num_layers, int)
    if isinstance(skip, int):  # mcore: every skip-th layer is full
        skip = [int(layer % skip != 0) for layer in range(1, num_layers + 1)]
    slides = skip if isinstance(skip, list) else [1] * num_layers
    kinds = ["sliding_attention" if window and slide else "full_attention" for slide in slides[:num_layers]]
    return {"sliding_window": window, "layer_types": kinds}


def _mcore_window(hf: Hf) -> tuple[int, int]:
    """HF counts the tokens that a token sees, itself among them; mcore those to its left and right."""
    return (count(hf, "sliding_window") - 1, 0)


def _hf_window(window: object) -> int | None:
    if window is None:
        return None
    if not isinstance(window, tuple | list) or len(window) != 2 or window[0] < 0 or window[1] != 0:
        raise ConfigError(
            f"window_size must be None or (tokens to the left, 0), found {window!r}. Remove the override."
        )
    return int(window[0]) + 1


# fmt: off
ACTIVATION     = Derive(("hidden_act",), _activation, _hidden_act)
HEADS          = Derive(("num_attention_heads", "num_key_value_heads", "head_dim"), _heads, _heads_back)
VOCAB          = Derive(("vocab_size",), _vocab, _vocab_back)
ROPE           = Derive(("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"), _rope, _rope_back)
BIASES         = Derive(("attention_bias", "mlp_bias"), _biases, _biases_back)
ATTENTION_BIAS = Derive(("attention_bias",), _biases, _attention_bias_back)
WINDOW         = Derive(("sliding_window",), _window, _window_back)
WINDOW_IF_USED = Derive(("sliding_window", "use_sliding_window"), _window_if_used, _window_if_used_back)
WINDOWS        = Derive(("sliding_window", "layer_types"), _windows, _windows_back)
# fmt: on
