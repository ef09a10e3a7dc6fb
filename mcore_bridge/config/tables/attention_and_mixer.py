"""The config table of Falcon-H1: a Mamba-2 mixer beside the attention of each layer, and multipliers everywhere."""

from dataclasses import dataclass

from mcore_bridge.config.fields import Derive, Field, Hf, Ignore, Map, Mcore, Require, count, is_number
from mcore_bridge.config.tables.mixers import MIXER
from mcore_bridge.config.tables.scales import scaled_scores
from mcore_bridge.errors import ConfigError, shown

_KIND = "M*-"


@dataclass(frozen=True)
class SideMultipliers:
    """The multipliers of inputs and outputs of the parts of a layer.

    Args:
        attention_in, attention_out: input and output of attention.
        mixer_in, mixer_out: input and output of the mixer.
        mixer_parts: z, x, B, C and the time steps, before the convolution.
        gate, mlp_out: the gate of the MLP before its activation, and the output of the MLP.
    """

    attention_in: float
    attention_out: float
    mixer_in: float
    mixer_out: float
    mixer_parts: tuple[float, ...]
    gate: float
    mlp_out: float


_ONE = {
    "attention_in": "attention_in_multiplier",
    "attention_out": "attention_out_multiplier",
    "mixer_in": "ssm_in_multiplier",
    "mixer_out": "ssm_out_multiplier",
}


def _number(hf: Hf, name: str) -> float:
    value = hf.get(name)
    if not is_number(value) or not value:
        raise ConfigError(f"{name} must be a number other than 0, found {shown(value)}.")
    return value


def _numbers(hf: Hf, name: str, size: int) -> tuple[float, ...]:
    values = hf.get(name)
    if not isinstance(values, list | tuple) or len(values) != size or not all(map(is_number, values)):
        raise ConfigError(f"{name} must be a list of {size} numbers, found {shown(values)}.")
    return tuple(values)


def _multipliers(hf: Hf) -> dict[str, object]:
    gate, mlp_out = _numbers(hf, "mlp_multipliers", 2)
    parts = _numbers(hf, "ssm_multipliers", 5)
    single = {name: _number(hf, hf_name) for name, hf_name in _ONE.items()}
    return {"side_multipliers": SideMultipliers(mixer_parts=parts, gate=gate, mlp_out=mlp_out, **single)}


def _multipliers_back(mcore: Mcore) -> dict[str, object]:
    own = mcore["side_multipliers"]
    assert isinstance(own, SideMultipliers)
    single = {hf_name: getattr(own, name) for name, hf_name in _ONE.items()}
    return {**single, "mlp_multipliers": [own.gate, own.mlp_out], "ssm_multipliers": list(own.mixer_parts)}


def _layers(hf: Hf) -> dict[str, object]:
    num_layers = count(hf, "num_hidden_layers")
    return {"num_layers": num_layers, "layer_kinds": (_KIND,) * num_layers}


def _layers_back(mcore: Mcore) -> dict[str, object]:
    return {"num_hidden_layers": mcore["num_layers"]}


def _norm(hf: Hf) -> dict[str, object]:
    normed = bool(hf.get("mamba_rms_norm"))
    if normed and hf.get("mamba_norm_before_gate"):
        raise ConfigError(
            "mamba_norm_before_gate must be False with mamba_rms_norm=True, found True: kernels of transformers "
            "always apply the gate first, but its torch code applies it last. Set it to False if the model was "
            "trained so."
        )
    return {"mamba_norm": normed}


def _norm_back(mcore: Mcore) -> dict[str, object]:
    return {"mamba_rms_norm": mcore["mamba_norm"], **({"mamba_norm_before_gate": False} if mcore["mamba_norm"] else {})}


BESIDE: tuple[Field, ...] = (
    *MIXER,
    *(Map("mamba_n_groups", "mamba_num_groups"), Map("embedding_multiplier", "embedding_scale")),
    Map("lm_head_multiplier", "logit_scale"),
    Derive((*_ONE.values(), "mlp_multipliers", "ssm_multipliers"), _multipliers, _multipliers_back),
    scaled_scores("key_multiplier"),
    Derive(
        ("mamba_rms_norm", "mamba_norm_before_gate"),
        _norm,
        _norm_back,
        ("`mamba_norm_before_gate` with `mamba_rms_norm`: kernels and torch code of transformers differ there",),
    ),
    Require("projectors_bias", (False,), "megatron-core's mixer has no bias in its projections"),
    Require("mlp_bias", (False,), "a multiplier of the gate is behind the projection, which would add its bias later"),
    Ignore("transformers requires the number of heads times their size", ("mamba_d_ssm",)),
    Ignore("it chooses how transformers runs the model", ("num_logits_to_keep",)),
)
LAYERS = Derive(("num_hidden_layers",), _layers, _layers_back)
