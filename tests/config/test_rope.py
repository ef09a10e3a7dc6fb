"""Ropes equal transformers' ropes: every type, both spellings, short and long texts. All other types raise."""

import importlib
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_bridge.architecture import architecture_of
from mcore_bridge.config.hf import read_config
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.config.rope import Rope, _mscale
from mcore_bridge.config.rope_spelling import merged, speaks_rope_parameters, spelled_by_layer
from mcore_bridge.config.transformer import to_gpt_arguments, to_transformer_config
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.blueprint import BuildOptions, make_blueprint
from tests.support.families import FAMILIES, ROPES, Json, built, family, rope_of, spelling_4, spelling_5, write
from tests.zoo import cases


def _without_rope(model_type: str) -> Json:
    return {name: value for name, value in family(model_type).items() if "rope" not in name and "dtype" not in name}


def _reference(hf, seq_len: int):
    """The rotary class of the family itself, after a first batch of ``seq_len`` tokens."""
    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[hf.model_type]
    module = importlib.import_module(f"transformers.models.{hf.model_type}.modeling_{hf.model_type}")
    embedding = getattr(module, f"{name}RotaryEmbedding")(hf)
    embedding(torch.zeros(1), torch.arange(seq_len)[None])
    return embedding


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("rope_type", ROPES)
@pytest.mark.parametrize("spelling", [spelling_4, spelling_5])
@pytest.mark.parametrize("seq_len", [7, 256, 257, 1000])
def test_frequencies_are_those_of_transformers(tmp_path: Path, model_type, rope_type, spelling, seq_len) -> None:
    hf = read_config(write(tmp_path, {**_without_rope(model_type), **spelling(rope_type)}))
    expected = _reference(hf, seq_len)
    rope = rope_of(hf)
    frequencies = rope.frequencies(seq_len)
    assert torch.equal(frequencies, expected.inv_freq)
    assert rope.attention_factor == expected.attention_scaling
    assert frequencies.dtype == torch.float32
    assert frequencies.shape == (8,)


@pytest.mark.parametrize("rope_type", ROPES)
def test_each_rope_differs_from_the_default(rope_type: str, tmp_path: Path) -> None:
    """Otherwise the tests above would pass for a reader that drops everything."""
    rope = rope_of(read_config(write(tmp_path, family("llama", rope_type))))
    plain = Rope(parameters={"rope_type": "default", "rope_theta": 1e4}, head_dim=16, max_position_embeddings=256)
    assert not torch.equal(rope.frequencies(1000), plain.frequencies(1000))
    assert rope.is_dynamic == (rope_type == "dynamic")


def test_only_dynamic_depends_on_the_length(tmp_path: Path) -> None:
    for rope_type in ROPES:
        rope = rope_of(read_config(write(tmp_path / rope_type, family("qwen3", rope_type))))
        assert torch.equal(rope.frequencies(256), rope.frequencies())
        assert torch.equal(rope.frequencies(257), rope.frequencies()) == (rope_type != "dynamic")
        rope.frequencies(1000)
        assert torch.equal(rope.frequencies(9), rope.frequencies())  # no state remains from other lengths


@pytest.mark.parametrize("rope_type", ROPES)
def test_frequencies_are_real_where_models_are_meta(rope_type: str, tmp_path: Path) -> None:
    """Meta builds make the model without storage, and still need its frequencies."""
    from accelerate import init_empty_weights

    rope = rope_of(read_config(write(tmp_path, family("llama", rope_type))))
    with init_empty_weights(include_buffers=True), torch.device("meta"):
        inside = rope.frequencies(1000), rope.frequencies()
    assert torch.equal(inside[0], rope.frequencies(1000))
    assert torch.equal(inside[1], rope.frequencies())


@pytest.mark.parametrize("head_dim", ["absent", None, 24])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_head_dim_is_derived_where_hf_derives_it(tmp_path: Path, model_type: str, head_dim) -> None:
    fields = {**family(model_type, "yarn"), "head_dim": head_dim}
    if head_dim == "absent":
        del fields["head_dim"]
    default = 128 if (model_type, head_dim) == ("qwen3", "absent") else 48 // 6  # 128 is the default of Qwen3Config
    try:
        rope = rope_of(read_config(write(tmp_path, fields)))
    except ConfigError:
        assert (model_type, head_dim) == ("qwen3", None)  # which transformers 5 refuses
    else:
        assert rope.head_dim == 2 * len(rope.frequencies()) == (24 if head_dim == 24 else default)


@given(st.floats(min_value=0.01, max_value=10.0))
def test_mcore_multiplies_by_exactly_the_attention_factor(factor: float) -> None:
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor

    found = _yarn_get_concentration_factor(math.e, _mscale(factor), 0.0)
    assert torch.tensor(found, dtype=torch.float32) == torch.tensor(factor, dtype=torch.float32)


@pytest.mark.parametrize("extra", [{}, {"attention_factor": 1.3}, {"mscale": 0.7, "mscale_all_dim": 1.1}])
def test_the_attention_factor_reaches_mcore(tmp_path: Path, extra: Json) -> None:
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
        _yarn_get_concentration_factor_from_config as concentration,
    )

    fields = family("llama", "yarn")
    fields["rope_scaling"] = {**fields["rope_scaling"], **extra}
    hf = read_config(write(tmp_path, fields))
    config = to_transformer_config(hf, architecture_of(hf).fields)
    assert concentration(config) == _reference(hf, 7).attention_scaling != 1.0
    plain = read_config(write(tmp_path / "plain", family("llama", "default")))
    assert concentration(to_transformer_config(plain, architecture_of(plain).fields)) == 1.0


def test_fused_rope_is_refused_where_it_drops_the_attention_factor(tmp_path: Path) -> None:
    hf = read_config(write(tmp_path, family("llama", "yarn")))
    with pytest.raises(ConfigError, match="apply_rope_fusion must be False"):
        to_transformer_config(hf, architecture_of(hf).fields, overrides={"apply_rope_fusion": True})


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0},
            "longrope|original_max",
        ),
        ({"rope_type": "yarn", "factor": 2.0, "llama_4_scaling_beta": 0.1}, "llama_4_scaling_beta"),
        (
            {"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.8782488562869419},
            "attention_factor=1.0 in a yarn rope, found None",
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "attn_factor": 1.0, "attention_factor": 1.0},
            "attention_factor=1.138629 in a yarn rope, found 1.0.* multiply cosines and sines by 1.0. SGLang",
        ),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "default", "full_attention": {"rope_type": "default"}}, "full_attention"),
        ({"rope_type": "linear", "factor": None}, "factor"),
        ({"rope_type": "default", "mrope_section": [2, 3, 3]}, "mrope_section"),
    ],
)
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_what_is_not_reproduced_is_refused_by_name(tmp_path: Path, scaling: Json, message: str, spelling: str) -> None:
    fields = {**_without_rope("llama"), spelling: {"rope_theta": 1e4, **scaling}}
    with pytest.raises(ConfigError, match=message):
        built(read_config(write(tmp_path, fields)))


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 2e5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "linear", "factor": 3.0}},
    ],
)
def test_two_spellings_that_disagree_are_refused(tmp_path: Path, fields: Json) -> None:
    with pytest.raises(ConfigError, match="Delete one of them"):
        rope_of(read_config(write(tmp_path, {**_without_rope("llama"), **fields})))


def test_the_oldest_spelling_is_read(tmp_path: Path) -> None:
    fields = {**_without_rope("llama"), "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}
    old = rope_of(read_config(write(tmp_path / "old", fields)))
    new = rope_of(read_config(write(tmp_path / "new", {**_without_rope("llama"), **spelling_5("linear")})))
    assert old == new


def test_overrides_of_rope_keep_the_meaning_that_mcore_gives_them(tmp_path: Path) -> None:
    hf = read_config(write(tmp_path, family("llama", "yarn")))
    table = architecture_of(hf).fields
    theta = rope_of(hf, rotary_base=777)
    assert theta.parameters == {**rope_of(hf).parameters, "rope_theta": 777}
    assert to_gpt_arguments(hf, table, overrides={"rotary_base": 777})["rotary_base"] == 777
    assert to_transformer_config(hf, table, overrides={"rotary_base": 777}).hf_rope == theta
    linear = rope_of(hf, seq_len_interpolation_factor=2.0)
    assert linear.parameters == {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    assert to_transformer_config(hf, table, overrides={"kv_channels": 32}).hf_rope.head_dim == 32
    for overrides in ({"rope_scaling": False}, {"rope_scaling_factor": 4.0}, {"seq_len_interpolation_factor": None}):
        with pytest.raises(ConfigError, match="switch on one kind"):
            rope_of(hf, **overrides)
    for overrides in ({"position_embedding_type": "none"}, {"rotary_percent": 0.5}):
        with pytest.raises(ConfigError, match="Remove the override"):
            to_transformer_config(hf, table, overrides=overrides)


def test_llama3_scaling_by_mcore_arguments_is_mcore_s_own_scaling() -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    rope = Rope(parameters={"rope_type": "default", "rope_theta": 5e5}, head_dim=64, max_position_embeddings=8192)
    ours = rope.overridden({"rope_scaling": True, "rope_scaling_factor": 32.0}).frequencies()
    theirs = RotaryEmbedding(
        64, 1.0, rotary_base=500000, rope_scaling=True, rope_scaling_factor=32.0, use_cpu_initialization=True
    ).inv_freq
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_fused_latent_attention_gets_the_cosines_that_mcore_would_give_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both follow from one yarn: in the kernel's shape and dtype, and with the attention factor."""
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    from mcore_bridge.factory.modules.rotary import LatentRotaryEmbedding

    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    hf = cases()["deepseek_v3-yarn"].hf
    config = to_transformer_config(hf, architecture_of(hf).fields)
    ours = LatentRotaryEmbedding(config.hf_rope, cp_group=None)
    theirs = YarnRotaryEmbedding(
        config.qk_pos_emb_head_dim,
        rotary_base=config.rotary_base,
        scaling_factor=config.rotary_scaling_factor,
        original_max_position_embeddings=config.original_max_position_embeddings,
        beta_fast=config.beta_fast,
        beta_slow=config.beta_slow,
        mscale=config.mscale,
        mscale_all_dim=config.mscale_all_dim,
        use_cpu_initialization=True,
    )
    for dtype in (torch.float32, torch.bfloat16):
        for mine, own in zip(*(each.get_cached_cos_sin(40, dtype=dtype) for each in (ours, theirs)), strict=True):
            assert mine.dtype == own.dtype == dtype
            torch.testing.assert_close(mine, own, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)
    assert float(ours.get_cached_cos_sin(1)[0].max()) != 1.0


PLAIN_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


def test_the_scale_of_latent_attention_is_that_of_the_rope_or_none() -> None:
    for own in ({}, {"mscale_all_dim": 0.5}):
        rope = Rope(parameters={**PLAIN_YARN, **own}, head_dim=16, max_position_embeddings=256)
        assert rope.to_latent()["mscale_all_dim"] == own.get("mscale_all_dim", 0.0)
        assert rope.query_temperature is None


def test_queries_grow_with_their_place_where_the_rope_says_how() -> None:
    rope = Rope(parameters={**PLAIN_YARN, "llama_4_scaling_beta": 0.1}, head_dim=16, max_position_embeddings=256)
    assert rope.query_temperature == (0.1, 64)


def test_an_overridden_base_is_said_in_all_spellings() -> None:
    """transformers 4 has other fields for it in GPT-NeoX."""
    hf = make_blueprint(
        cases()["gpt_neox"].hf, BuildOptions(dims=ParallelDims(), dtype=torch.float32, overrides={"rotary_base": 5e4})
    ).hf
    for said in (getattr(hf, "rope_parameters", None) or {}, {"rope_theta": getattr(hf, "rotary_emb_base", 5e4)}):
        assert said.get("rope_theta", 5e4) == 5e4
    assert rope_of(hf).parameters["rope_theta"] == 5e4


@pytest.mark.skipif(speaks_rope_parameters(), reason="transformers 5 has both ropes")
def test_a_rope_of_sliding_layers_that_transformers_4_cannot_say_is_refused() -> None:
    plain = {"rope_type": "default", "rope_theta": 1e4}
    assert spelled_by_layer(plain, plain)["rope_local_base_freq"] == 1e4
    with pytest.raises(ConfigError, match="sliding layers must have a rope without scaling"):
        spelled_by_layer(plain, {**plain, "partial_rotary_factor": 0.5})


def test_yarn_of_a_model_that_was_trained_with_it_is_yarn(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64}
    ropes = [
        rope_of(read_config(write(tmp_path, {**_without_rope("llama"), "rope_theta": 1e4, "rope_scaling": rope})))
        for rope in (yarn, {**yarn, "finetuned": True})  # as in the authors' code
    ]
    assert ropes[0] == ropes[1]


def test_the_old_name_of_a_type_is_understood() -> None:
    """Configs that transformers has not converted yet have the old name."""
    assert merged({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}})["rope_type"] == "linear"
    assert merged({"rope_theta": 1e4})["rope_type"] == "default"


@pytest.mark.parametrize("factor", [0.375, 1.5])
def test_dims_that_cannot_be_rotated_are_refused(factor: float) -> None:
    """Three of eight dims, and twelve dims."""
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": factor}
    with pytest.raises(ConfigError, match="must rotate an even number of the 8 dims"):
        Rope(parameters=parameters, head_dim=8, max_position_embeddings=64)


def test_a_factor_of_one_is_no_partial_rotation(tmp_path: Path) -> None:
    """Configs of other families have this field, too."""
    fields = family("llama") | {"rope_scaling": None} | spelling_5("linear")
    fields["rope_parameters"]["partial_rotary_factor"] = 1
    config = read_config(write(tmp_path, fields))
    assert rope_of(config).rotary_dim == rope_of(config).head_dim
    assert "partial_rotary_factor" not in rope_of(config).parameters
