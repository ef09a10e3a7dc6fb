"""Entries of config tables that need more than one field. Each is a pair of functions, forward and back."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the usual name)

from mcore_bridge.config.fields import Derive, Field, Hf, Mcore, count
from mcore_bridge.config.layer_kinds import layers_but_full
from mcore_bridge.config.quantization import read_quantization
from mcore_bridge.config.rope import head_dim
from mcore_bridge.errors import ConfigError, shown

GELU_TANH = functools.partial(F.gelu, approximate="tanh")


def xielu(
    hidden: torch.Tensor, alpha_p: torch.Tensor, alpha_n: torch.Tensor, beta: torch.Tensor, eps: torch.Tensor
) -> torch.Tensor:
    """The activation of Apertus, by numbers of the checkpoint: a parabola above zero, and an integral of ELU below.

    It is the ``activation_func`` of configs; ``factory/modules/learned_activation.py`` has the numbers.
    """
    above = F.softplus(alpha_p) * hidden * hidden + beta * hidden
    below = (torch.expm1(torch.min(hidden, eps)) - hidden) * (beta + F.softplus(alpha_n)) + beta * hidden
    return torch.where(hidden > 0, above, below)


@functools.cache
def _activations() -> dict[str, Callable[..., object]]:
    """Activation functions by their names in HF. The first name of a function is written back."""
    from megatron.core.activations import squared_relu

    by_tanh = dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), GELU_TANH)
    return {"silu": F.silu, "swish": F.silu, "gelu": F.gelu, **by_tanh, "relu": F.relu, "relu2": squared_relu}


def activation(field: str, *unread: str) -> Derive:
    """The activation that ``field`` names. transformers does not read the fields ``unread``."""

    def forward(hf: Hf) -> dict[str, object]:
        name, known = hf.get(field), _activations()
        if name not in known:
            raise ConfigError(f"{field} must be one of {sorted(known)}, which megatron-core has too; found {name!r}.")
        return {"activation_func": known[str(name)]}

    def backward(mcore: Mcore) -> dict[str, object]:
        return {field: _activation_name(mcore["activation_func"])}

    others = "any but SiLU, GELU (exact, or by tanh), ReLU and its square: only these are tested to be equal in both"
    return Derive((field, *unread), forward, backward, (f"`{field}`, {others}",))


def _activation_name(activation: object) -> str:
    for name, function in _activations().items():
        if comparable(function) == comparable(activation):
            return name
    raise ConfigError(
        f"activation_func must be one that HF has a name for ({sorted(_activations())}), found {activation!r}."
    )


def comparable(value: object) -> object:
    """A comparable form of ``value``: partials of one call become equal, and lists become tuples."""
    if isinstance(value, functools.partial):
        return (value.func, value.args, tuple(value.keywords.items()))
    return tuple(value) if isinstance(value, list) else value


def _heads(hf: Hf) -> dict[str, object]:
    heads = count(hf, "num_attention_heads")
    groups = count(hf, "num_key_value_heads", unset=heads)
    if heads % groups:
        raise ConfigError(f"num_attention_heads={heads} must be a multiple of num_key_value_heads={groups}.")
    return {"num_attention_heads": heads, "num_query_groups": groups, "kv_channels": head_dim(hf)}


def _heads_back(mcore: Mcore) -> dict[str, object]:
    return {
        "num_attention_heads": mcore["num_attention_heads"],
        "num_key_value_heads": mcore["num_query_groups"],
        "head_dim": mcore["kv_channels"],
    }


def _divided(hf: Hf) -> dict[str, object]:
    values, given = _heads({**hf, "head_dim": None}), hf.get("head_dim")
    if given not in (None, values["kv_channels"]):
        raise ConfigError(
            f"head_dim must be {values['kv_channels']}, which is hidden_size / num_attention_heads, found {given!r}: "
            "transformers computes this size for any head_dim. Delete head_dim."
        )
    return values


def _divided_back(mcore: Mcore) -> dict[str, object]:
    fields = _heads_back(mcore)
    size, expected = fields.pop("head_dim"), count(mcore, "hidden_size") // count(mcore, "num_attention_heads")
    if size != expected:
        raise ConfigError(f"kv_channels must be hidden_size / num_attention_heads={expected}, found {size!r}.")
    return fields


def _vocab(hf: Hf) -> dict[str, object]:
    size = count(hf, "vocab_size")
    return {"vocab_size": size, "hf_vocab_size": size}


def _vocab_back(mcore: Mcore) -> dict[str, object]:
    return {"vocab_size": mcore.get("hf_vocab_size", mcore["vocab_size"])}


def biases(attention: str, output: str | None, mlp: str | None) -> Derive:
    """The entry of a family whose biases follow HF fields.

    mcore's ``add_bias_linear`` gives a bias to all linear layers, so a bias in the MLP needs all others.

    Args:
        attention: the field for the biases of q, k and v.
        output: the field for the bias of the attention output; None: it has no bias. It may be the same field.
        mlp: the field for the biases of the MLP; None: it has none.
    """
    names = tuple(dict.fromkeys(name for name in (attention, output, mlp) if name is not None))

    def forward(hf: Hf) -> dict[str, object]:
        has_bias = [name is not None and bool(hf.get(name, False)) for name in (attention, output, mlp)]
        if has_bias[2] and not all(has_bias):
            needed = dict.fromkeys((attention, output))
            missing = [f"{name}=True" if name else "a bias of its output" for name in needed if not hf.get(str(name))]
            raise ConfigError(
                f"{mlp}=True must come with {' and '.join(missing)}: megatron-core's add_bias_linear gives a bias to "
                "the MLP and to all of attention together. Set these too, with zero biases, if this family has them."
            )
        return {"add_qkv_bias": has_bias[0], "attention_output_bias": has_bias[1], "add_bias_linear": has_bias[2]}

    def backward(mcore: Mcore) -> dict[str, object]:
        in_mlp = mcore["add_bias_linear"]
        has_bias = (mcore["add_qkv_bias"], mcore.get("attention_output_bias", in_mlp), in_mlp)
        pairs = list(zip((attention, output, mlp), has_bias, strict=True))
        said = {name: value for name, value in pairs if name is not None}
        if any(value != said.get(str(name), False) for name, value in pairs) or (in_mlp and not all(has_bias)):
            raise ConfigError(
                f"Biases must be expressible by the HF fields {' and '.join(names)}, found add_qkv_bias="
                f"{has_bias[0]}, attention_output_bias={has_bias[1]}, add_bias_linear={in_mlp}. Remove the override."
            )
        return said

    needed = dict.fromkeys(f"`{name}`" if name else "a bias of its output" for name in (attention, output))
    lone = (
        f"`{mlp}` without {' and '.join(needed)}: megatron-core's add_bias_linear gives a bias to all of attention too"
    )
    return Derive(names, forward, backward, () if mlp is None or {attention, output} == {mlp} else (lone,))


def _window(hf: Hf) -> dict[str, object]:
    window = hf.get("sliding_window")
    return {"window_size": None if window is None else _mcore_window(hf), "window_attn_skip_freq": None}


def _window_back(mcore: Mcore) -> dict[str, object]:
    if mcore["window_attn_skip_freq"] is not None:
        raise ConfigError(
            f"window_attn_skip_freq must be None, found {mcore['window_attn_skip_freq']!r}: in this architecture all "
            "layers have a window or none has. Remove the override."
        )
    return {"sliding_window": _hf_window(mcore["window_size"])}


def _window_if_used(hf: Hf) -> dict[str, object]:
    return _window(hf if hf.get("use_sliding_window") else {**hf, "sliding_window": None})


def _switched(back: Callable[[Mcore], dict[str, object]]) -> Callable[[Mcore], dict[str, object]]:
    return lambda mcore: {**(fields := back(mcore)), "use_sliding_window": fields["sliding_window"] is not None}


def _full_layers(hf: Hf) -> dict[str, object]:
    kinds = hf.get("layer_types")
    if kinds is not None and set(kinds) != {"full_attention"}:  # type: ignore[call-overload]  # else no list of names
        raise ConfigError(f"layer_types must be 'full_attention' for every layer, found {shown(kinds)}.")
    return {}


def _no_windows(hf: Hf) -> dict[str, object]:
    return {**_full_layers(hf), "window_size": None, "window_attn_skip_freq": None}


def _no_windows_back(mcore: Mcore) -> dict[str, object]:
    if mcore["window_size"] is not None:
        raise ConfigError(
            f"window_size must be None, found {mcore['window_size']!r}: this architecture has no windows. Remove the "
            "override."
        )
    return {}


def _windows(hf: Hf) -> dict[str, object]:
    kinds, num_layers = hf.get("layer_types"), count(hf, "num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ConfigError(f"layer_types must name the attention of each of the {num_layers} layers, found {kinds!r}.")
    if unknown := sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"}):
        raise ConfigError(f"layer_types must be 'full_attention' or 'sliding_attention', found also {unknown}.")
    slides = [int(kind == "sliding_attention") for kind in kinds]
    if not any(slides):
        return {"window_size": None, "window_attn_skip_freq": None}
    return {"window_size": _mcore_window(hf), "window_attn_skip_freq": None if all(slides) else slides}


def _windows_back(mcore: Mcore) -> dict[str, object]:
    slides = layers_but_full(mcore, "window_attn_skip_freq", unset=1)
    window = _hf_window(mcore["window_size"]) if any(slides) else None
    kinds = ["sliding_attention" if window and slide else "full_attention" for slide in slides]
    return {"sliding_window": window, "layer_types": kinds}


def _windows_or_default_back(mcore: Mcore) -> dict[str, object]:
    return {name: value for name, value in _windows_back(mcore).items() if value is not None}


def _windows_switched(hf: Hf) -> dict[str, object]:
    windows = _windows(hf)
    if windows["window_size"] is not None and not hf.get("use_sliding_window"):
        raise ConfigError(
            "use_sliding_window must be True where layer_types has sliding layers, found False: the attention kernels "
            "of transformers disagree about these layers. Set it, or make them full_attention."
        )
    return windows


def _mcore_window(hf: Hf) -> tuple[int, int]:
    """The window of mcore, which counts tokens to the left and right. HF also counts the token itself."""
    return (count(hf, "sliding_window") - 1, 0)


def _hf_window(window: object) -> int | None:
    if window is None:
        return None
    if not isinstance(window, tuple | list) or len(window) != 2 or window[0] < 0 or window[1] != 0:
        raise ConfigError(
            f"window_size must be None or (tokens to the left, 0), found {window!r}. Remove the override."
        )
    return int(window[0]) + 1


_OTHER_LAYERS = "`layer_types` other than `full_attention` and `sliding_attention`: layers differ only by the window"
_DISAGREED = "`use_sliding_window=False` with sliding layers: the attention kernels of transformers disagree about them"
# fmt: off
ACTIVATION     = activation("hidden_act")
HEADS          = Derive(("num_attention_heads", "num_key_value_heads", "head_dim"), _heads, _heads_back)
DIVIDED_HEADS  = Derive(HEADS.names, _divided, _divided_back, (
    "`head_dim` other than `hidden_size / num_attention_heads`: transformers computes this size for any",))
VOCAB          = Derive(("vocab_size",), _vocab, _vocab_back)
BIASES         = biases("attention_bias", "attention_bias", "mlp_bias")
ATTENTION_BIAS = biases("attention_bias", "attention_bias", None)
WINDOW         = Derive(("sliding_window",), _window, _window_back)
WINDOW_IF_USED = Derive(("sliding_window", "use_sliding_window"), _window_if_used, _switched(_window_back))
FULL_LAYERS    = Derive(("layer_types",), _full_layers, lambda mcore: {}, (
    "`layer_types` other than `full_attention`: no layer of this family slides",))
NO_WINDOWS     = Derive(("layer_types",), _no_windows, _no_windows_back, (
    "`layer_types` other than `full_attention`: releases of transformers disagree on which layers slide",))
WINDOWS        = Derive(("sliding_window", "layer_types"), _windows, _windows_back, (_OTHER_LAYERS,))
WINDOWS_OR_DEFAULT = Derive(WINDOWS.names, _windows, _windows_or_default_back, WINDOWS.refuses)
SWITCHED       = Derive(
    ("sliding_window", "layer_types", "use_sliding_window"), _windows_switched, _switched(_windows_back),
    (_OTHER_LAYERS, _DISAGREED),
)
# fmt: on
"""``WINDOWS_OR_DEFAULT`` is for families in which transformers needs a window, even if no layer slides."""


def _accept(hf: Hf) -> dict[str, object]:
    read_quantization(hf.get("quantization_config"))
    return {}


QUANTIZATION = Derive(
    ("quantization_config",),
    _accept,
    lambda mcore: {},
    refuses=(
        "`quant_method` other than fp8, mxfp4, compressed-tensors and modelopt: load the release in bf16, or write one",
        "formats of compressed-tensors and ModelOpt that [quantized.md](../guide/quantized.md) does not list: load "
        "the release in bf16, or write one",
    ),
)
"""The field of an HF config about quantized weights. It changes how files are read, and does not change the model."""


def called(entry: Derive, **names: str) -> Derive:
    """``entry`` with other names of HF fields; transformers accepts either name."""

    def forward(hf: Hf) -> dict[str, object]:
        return entry.forward({**{old: hf[new] for old, new in names.items() if new in hf}, **hf})

    def backward(mcore: Mcore) -> dict[str, object]:
        return {names.get(name, name): value for name, value in entry.backward(mcore).items()}

    both = dict.fromkeys((*(names.get(name, name) for name in entry.names), *entry.names))
    return Derive(tuple(both), forward, backward, entry.refuses)


def repeated(entry: Field, names: dict[str, Callable[[Any], object]]) -> Derive:
    """``entry`` with further HF fields, which engines read, and transformers does not.

    Args:
        entry: the entry of the fields that transformers reads.
        names: the further fields, each with its value as a function of the fields of ``entry``. A config may lack them.
            A list may be longer than the value.
    """

    def forward(hf: Hf) -> dict[str, object]:
        values, wrong = entry.to_mcore(hf), {}
        for name, value in names.items():
            if (given := hf.get(name)) is None:
                continue
            expected = value(hf)
            own = given[: len(expected)] if isinstance(given, list) and isinstance(expected, list) else given
            if own != expected:
                wrong[name] = shown(expected), shown(given)
        if wrong:
            rights, givens = zip(*wrong.values(), strict=True)
            raise ConfigError(
                f"{', '.join(wrong)} must be {[*rights]}, as transformers has them under other names, found "
                f"{[*givens]}: engines would read another model. Correct or delete them."
            )
        return values

    def backward(mcore: Mcore) -> dict[str, object]:
        fields = entry.to_hf(mcore)
        return {**fields, **{name: value(fields) for name, value in names.items()}}

    listed = ", ".join(f"`{name}`" for name in names)
    refused = f"{listed} of another model than transformers reads: engines would load it"
    claimed = tuple(dict.fromkeys((*entry.names, *names)))
    return Derive(claimed, forward, backward, (*getattr(entry, "refuses", ()), refused))


def _parallel(hf: Hf) -> dict[str, object]:
    return {"parallel_norms": 2 if hf.get("use_parallel_residual") else None}


def _parallel_back(mcore: Mcore) -> dict[str, object]:
    return {"use_parallel_residual": mcore["parallel_norms"] is not None}


PARALLEL_OR_NOT = Derive(("use_parallel_residual",), _parallel, _parallel_back)
"""Either attention and MLP each read a norm of the layer's input, or the MLP comes after attention as usual."""
