"""Config tables work in both directions: a config that is translated and back is unchanged, for all sizes."""

import json

from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, PretrainedConfig

from mcore_bridge.config.hf import read_config
from mcore_bridge.config.layer_kinds import layers_but_full
from mcore_bridge.config.rope_spelling import read_parameters
from mcore_bridge.config.transformer import to_gpt_arguments, to_hf_config, to_transformer_config
from tests.support.families import FAMILIES, ROPES, Json, built, ignored_by, spelling_4, spelling_5, table_of


@st.composite
def checkpoints(draw: st.DrawFn) -> Json:
    """Config files of all families, spellings and geometries, with derived, explicit and None fields."""
    groups, ratio, size = draw(st.tuples(*[st.sampled_from([1, 2, 3, 4])] * 3))
    num_layers, model_type = draw(st.integers(1, 6)), draw(st.sampled_from(FAMILIES))
    fields: Json = {
        "model_type": model_type,
        "vocab_size": draw(st.integers(2, 500)),
        "hidden_size": groups * ratio * 2 * size,
        "intermediate_size": draw(st.integers(1, 99)),
        "num_hidden_layers": num_layers,
        "num_attention_heads": groups * ratio,
        "max_position_embeddings": draw(st.integers(64, 512)),
        "num_key_value_heads": draw(st.sampled_from([groups, groups * ratio])),
        "head_dim": draw(st.sampled_from([4, 16, 128])),
        "tie_word_embeddings": draw(st.booleans()),
        "rms_norm_eps": draw(st.floats(1e-8, 1e-2)),
        "initializer_range": draw(st.floats(1e-4, 1.0)),
        "hidden_act": draw(st.sampled_from(["silu", "gelu", "relu", "gelu_fast", "gelu_pytorch_tanh"])),
        "attention_dropout": draw(st.sampled_from([0.0, 0.1])),
    }
    if model_type != "qwen3" and draw(st.booleans()):
        fields["head_dim"] = None
    if draw(st.booleans()):
        fields.pop("num_key_value_heads" if model_type == "llama" else "attention_dropout")
    if model_type in ("llama", "qwen3"):
        fields["attention_bias"] = draw(st.booleans())
    if model_type == "llama":
        fields["mlp_bias"] = fields["attention_bias"] and draw(st.booleans())
    if model_type != "llama":
        fields["sliding_window"] = draw(st.sampled_from([None, 1, 8]))
    if model_type.startswith("qwen"):
        fields |= {"use_sliding_window": fields["sliding_window"] is not None}
        fields |= {"max_window_layers": draw(st.integers(0, num_layers))}
    spelling = draw(st.sampled_from([spelling_4, spelling_5]))
    return fields | spelling(draw(st.sampled_from(sorted(ROPES))), draw(st.sampled_from([1e4, 5e5])))


def _expected(hf: PretrainedConfig, name: str) -> object:
    """The field of ``hf`` with what HF derives filled in, and with synonyms and windows that no layer has folded."""
    value = getattr(hf, name, None)
    match name:
        case "head_dim":
            return value or hf.hidden_size // hf.num_attention_heads
        case "hidden_act":
            return {"gelu_fast": "gelu_pytorch_tanh"}.get(value, value)
        case "sliding_window" if "sliding_attention" not in getattr(hf, "layer_types", ["sliding_attention"]):
            return None
        case "rope_parameters":
            return read_parameters(hf.to_dict())
    return value


@given(checkpoints())
def test_hf_to_mcore_to_hf_is_the_identity(fields: Json) -> None:
    hf = read_config(CONFIG_MAPPING[fields["model_type"]].from_dict(json.loads(json.dumps(fields))))
    table = table_of(hf)
    back = to_hf_config(to_transformer_config(hf, table), to_gpt_arguments(hf, table), table)
    assert back == {name: _expected(hf, name) for name in back}
    mapped = {name for name in fields if name in hf.to_dict()} - ignored_by(table)
    assert mapped - {"model_type", "rope_parameters", "rope_theta", "rope_scaling"} <= back.keys()


@given(checkpoints())
def test_what_comes_back_is_read_alike(fields: Json) -> None:
    """mcore to HF to mcore is the identity on all values that HF configs can have."""
    hf = read_config(CONFIG_MAPPING[fields["model_type"]].from_dict(json.loads(json.dumps(fields))))
    table = table_of(hf)
    back = to_hf_config(to_transformer_config(hf, table), to_gpt_arguments(hf, table), table)
    if "layer_types" in back:
        back["use_sliding_window"] = back["sliding_window"] is not None
    again = read_config(CONFIG_MAPPING[hf.model_type].from_dict(back))
    assert built(again) == built(hf)


def test_every_nth_layer_counts_from_one() -> None:
    """With n = 4, the fourth and the eighth layer have full attention, as in megatron-core."""
    mcore = {"num_layers": 8, "linear_attention_freq": 4}
    assert layers_but_full(mcore, "linear_attention_freq", unset=0) == [1, 1, 1, 0, 1, 1, 1, 0]
