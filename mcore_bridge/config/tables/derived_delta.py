"""Entries of config tables for models with linear attention (the gated delta rule) in some layers."""

from mcore_bridge.config.fields import Derive, Hf, Mcore, count
from mcore_bridge.config.tables.derived import layers_but_full
from mcore_bridge.errors import ConfigError

_KINDS = ("full_attention", "linear_attention")


def _linear(hf: Hf) -> dict[str, object]:
    kinds, num_layers = hf.get("layer_types"), count(hf, "num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - set(_KINDS):
        raise ConfigError(
            f"layer_types must name one of {_KINDS} for each of the {num_layers} layers, found {kinds!r}."
        )
    if "linear_attention" not in kinds:
        return {"experimental_attention_variant": None, "linear_attention_freq": None}
    if hf.get("hidden_act") not in ("silu", "swish"):
        raise ConfigError(
            f"hidden_act must be 'silu' in a model with linear attention, found {hf.get('hidden_act')!r}: with others, "
            "transformers 4.57 and 5 differ in the activation of the convolution, and fused kernels have none."
        )
    freq = [int(kind == "linear_attention") for kind in kinds]
    return {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": freq}


def _linear_back(mcore: Mcore) -> dict[str, object]:
    return {"layer_types": [_KINDS[kind] for kind in layers_but_full(mcore, "linear_attention_freq", unset=0)]}


_REFUSED = (
    "`layer_types` but `full_attention` and `linear_attention`: the kind of attention is all that layers differ by",
    "`hidden_act` but SiLU where layers attend linearly: transformers 4.57 and 5 disagree on the convolution otherwise",
)
LINEAR_LAYERS = Derive(("layer_types",), _linear, _linear_back, _REFUSED)
