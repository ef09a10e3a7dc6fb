"""Configs of families with norms in other places, soft caps and ropes by layer: published configs, their inverse,
refusals.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

from mcore_bridge.config.hf import read_config
from mcore_bridge.config.rope import Rope
from mcore_bridge.config.tables.derived import WINDOWS
from mcore_bridge.config.tables.scales import QUERY
from mcore_bridge.config.transformer import to_gpt_arguments, to_hf_config, to_transformer_config
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.multipliers import EmbeddingScale
from tests import zoo
from tests.support.families import Json, built, read, table_of
from tests.zoo.norms import CASES, KINDS

SPEAKS_4 = transformers.__version__.startswith("4.")
SCALED_OLMO2 = "olmo2-one-group"
SIZES: Json = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
YARN: Json = {
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "yarn",
}
GEMMA3: Json = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
GEMMA3_OF_5: Json = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}
OLMO3_OF_5: Json = {
    "rope_parameters": {
        "full_attention": {**YARN, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
    }
}
HUNYUAN: Json = {
    "use_qk_norm": True,
    "use_cla": False,
    "cla_share_factor": 2,
    "norm_type": "rms",
    "mlp_bias": False,
    "attention_head_dim": 8,
    "head_dim": 8,
    "num_experts": 1,
    "org_vocab_size": 97,
    "pad_id": 3,
    "rope_theta": 1e4,
    "rope_scaling": {
        "alpha": 1000.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "type": "dynamic",
    },
}


def config(model_type: str, folder: Path, **fields: Any) -> Any:
    return read({"model_type": model_type, **SIZES, **fields}, folder)


@pytest.mark.parametrize("name", zoo.params(CASES))
def test_what_comes_back_is_read_alike(name: str) -> None:
    if SPEAKS_4 and name == SCALED_OLMO2:
        pytest.skip("transformers 4 takes its rope_scaling in the oldest spelling only")
    hf = read_config(zoo.cases()[name].hf)
    table = table_of(hf)
    back = to_hf_config(to_transformer_config(hf, table), to_gpt_arguments(hf, table), table)
    assert back.keys() - {"head_dim"} <= hf.to_dict().keys() | {"partial_rotary_factor", "rope_scaling"}
    again = read_config(CONFIG_MAPPING[hf.model_type].from_dict({**back, "pad_token_id": hf.pad_token_id}))
    assert built(again) == built(hf)


@pytest.mark.parametrize(("freq", "found"), [(2, [1, 0, 1, 0]), ([1, 1, 0, 0], [1, 1, 0, 0]), (None, [1, 1, 1, 1])])
def test_windows_come_back_by_layer_however_mcore_says_them(freq: object, found: list[int]) -> None:
    kinds = [("full_attention", "sliding_attention")[each] for each in found]
    mcore = {"num_layers": 4, "window_size": (4, 0), "window_attn_skip_freq": freq}
    assert WINDOWS.to_hf(mcore) == {"sliding_window": 5, "layer_types": kinds}


@pytest.mark.parametrize("window", [(-1, 0), (4, 1), (4, 0, 0), 4])
def test_windows_that_hf_cannot_say_are_refused(window: object) -> None:
    with pytest.raises(ConfigError, match="window_size"):
        WINDOWS.to_hf({"num_layers": 1, "window_size": window, "window_attn_skip_freq": None})


@pytest.mark.parametrize("fields", [GEMMA3, GEMMA3_OF_5], ids=["spelled as 4", "spelled as 5"])
def test_gemma3_rotates_by_two_bases(tmp_path: Path, fields: Json) -> None:
    hf = config("gemma3_text", tmp_path, **fields, sliding_window=5, sliding_window_pattern=2, cache_implementation="x")
    mcore = to_transformer_config(hf, table_of(hf))
    assert (mcore.hf_rope.theta, mcore.hf_rope.parameters["factor"]) == (1e6, 8.0)
    assert mcore.hf_sliding_rope.parameters == {"rope_type": "default", "rope_theta": 1e4}
    assert mcore.window_attn_skip_freq == [1, 0, 1, 0]


def test_olmo3_scales_the_rope_of_full_layers_only(tmp_path: Path) -> None:
    hf = config("olmo3", tmp_path / "5", **OLMO3_OF_5)
    mcore = to_transformer_config(hf, table_of(hf))
    assert mcore.hf_rope.attention_factor == YARN["attention_factor"]
    assert mcore.hf_sliding_rope.attention_factor == 1.0
    assert mcore.hf_sliding_rope.theta == 5e5
    assert built(config("olmo3", tmp_path / "4", rope_theta=5e5, rope_scaling=YARN)) == built(hf)


def test_hunyuan_stretches_its_base_once(tmp_path: Path) -> None:
    hf = config("hunyuan_v1_dense", tmp_path, **HUNYUAN)
    rope = to_transformer_config(hf, table_of(hf)).hf_rope
    stretched = {"rope_type": "default", "rope_theta": 1e4 * 1000 ** (8 / 6)}
    expected = Rope(parameters=stretched, head_dim=8, max_position_embeddings=64).frequencies()
    assert torch.equal(rope.frequencies(), expected)
    assert torch.equal(rope.frequencies(1000), expected)
    assert not rope.is_dynamic
    wider = rope.overridden({"kv_channels": 16, "rotary_base": 500.0})
    assert (wider.frequencies().shape, wider.theta) == ((8,), 500.0)
    with pytest.raises(ConfigError, match="rope_scaling"):
        rope.overridden({"rope_scaling": True})


def test_the_embedding_scale_is_rounded_as_transformers_rounds_it() -> None:
    embeddings = torch.randn(64, 48).bfloat16()
    scaled = EmbeddingScale(48**0.5)(torch.nn.Identity(), None, embeddings)
    assert torch.equal(scaled, embeddings * torch.tensor(48**0.5, dtype=torch.bfloat16))
    assert not torch.equal(scaled, (embeddings.float() * 48**0.5).bfloat16())


@pytest.mark.parametrize("scalar", [256, 168, 144, 7, 20.5, 1e-3, 255.99999999999997])
def test_the_scale_of_queries_has_a_way_back(scalar: float) -> None:
    back = QUERY.backward(QUERY.forward({"query_pre_attn_scalar": scalar}))["query_pre_attn_scalar"]
    assert isinstance(back, int | float)
    assert back**-0.5 == scalar**-0.5
    assert math.isclose(back, scalar)


SLIDING = {"sliding_window": 5, "layer_types": KINDS}
REFUSED: dict[str, tuple[str, Json, str]] = {
    "scores of gemma3 capped": ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attention of transformers drops it"),
    "both directions": ("gemma", {"use_bidirectional_attention": True}, "causal"),
    "no cap": ("gemma2", {"final_logit_softcapping": 0.0}, "positive"),
    "no scale": ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive"),
    "nothing rotates": (
        "exaone4",
        {"layer_types": ["full_attention"] * 4, "sliding_window": 5},
        "no layer of transformers would have a rope",
    ),
    "shared keys": ("hunyuan_v1_dense", {"use_cla": True}, "nothing else"),
    "alpha elsewhere": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 9.0}}, "alpha"),
    "more than alpha": (
        "hunyuan_v1_dense",
        {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 9.0, "truncate": 1}},
        "trunc",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_reproduced_raises(name: str, tmp_path: Path) -> None:
    model_type, fields, reason = REFUSED[name]
    with pytest.raises(ConfigError, match=reason):
        built(config(model_type, tmp_path, **fields))


def test_ropes_of_layers_that_the_installed_transformers_cannot_say_raise(tmp_path: Path) -> None:
    two_bases: Json = {
        kind: {"rope_type": "default", "rope_theta": base} for kind, base in zip(KINDS[:2], (1e3, 1e4), strict=True)
    }
    one_kind: Json = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}, "chunked_attention": {"a": 1}}
    scaled: Json = {**two_bases, "sliding_attention": {"rope_type": "linear", "rope_theta": 1e3, "factor": 2.0}}
    with pytest.raises(ConfigError, match="rope_parameters by layer"):
        built(config("gemma3_text", tmp_path / "one", rope_parameters=one_kind))
    cases = ("olmo3", two_bases, "the same for all"), ("gemma3_text", scaled, "without scaling")
    for model_type, ropes, refused in cases:
        if SPEAKS_4:
            with pytest.raises(ConfigError, match=refused):
                built(config(model_type, tmp_path / model_type, rope_parameters=ropes))
        else:
            assert built(config(model_type, tmp_path / model_type, rope_parameters=ropes))


@pytest.mark.parametrize(
    ("name", "overrides", "reason"),
    [
        ("gemma", {"hidden_size": 96}, "embedding_scale"),
        ("exaone4", {"no_rope_freq": [0, 0, 0, 0]}, "no_rope_freq"),
        ("gemma2", {"layernorm_zero_centered_gamma": False}, "layernorm_zero_centered_gamma"),
    ],
)
def test_overrides_that_hf_cannot_say_do_not_come_back(name: str, overrides: Json, reason: str) -> None:
    hf = read_config(zoo.cases()[name].hf)
    table = table_of(hf)
    mcore = to_transformer_config(hf, table)
    for field, value in overrides.items():
        setattr(mcore, field, value)
    with pytest.raises(ConfigError, match=reason):
        to_hf_config(mcore, to_gpt_arguments(hf, table), table)
