"""Sparse attention: published configs, refusals with their reasons, and selections that layers share."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

import mcore_bridge as mb
from mcore_bridge import installed
from mcore_bridge.architecture import architecture_of, read_hf
from mcore_bridge.config.layer_kinds import shares_selection
from mcore_bridge.config.tables.sparse_attention import SHARING
from mcore_bridge.config.transformer import to_gpt_arguments, to_hf_config, to_transformer_config
from mcore_bridge.errors import ConfigError, MeshError
from tests import zoo
from tests.support import mtp_checkpoints
from tests.support.fake_mesh import rank_of
from tests.support.mtp import goes_round
from tests.zoo.latent import GROUPED
from tests.zoo.sparse import sparse

pytestmark = pytest.mark.skipif("deepseek_v32" not in CONFIG_MAPPING, reason="this transformers has no such model")
built = pytest.mark.skipif("deepseek_v32" not in zoo.cases(), reason="this megatron-core has no such attention")

LATENT = json.loads("""{
  "attention_bias": false, "attention_dropout": 0.0, "dtype": "bfloat16", "ep_size": 1, "first_k_dense_replace": 3,
  "hidden_act": "silu", "index_head_dim": 128, "index_topk": 2048, "initializer_range": 0.02, "kv_lora_rank": 512,
  "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_routed_experts": 256, "n_shared_experts": 1,
  "norm_topk_prob": true, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1, "pretraining_tp": 1,
  "qk_rope_head_dim": 64, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": false,
  "topk_method": "noaux_tc", "use_cache": true, "num_hidden_layers": 61, "rms_norm_eps": 1e-6
}""")
PUBLISHED = {
    "deepseek_v32": json.loads("""{
      "hidden_size": 7168, "index_n_heads": 64, "intermediate_size": 18432, "max_position_embeddings": 163840,
      "n_group": 8, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
      "qk_nope_head_dim": 128, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
      "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000,
      "topk_group": 4, "v_head_dim": 128, "vocab_size": 129280
    }"""),
    "glm_moe_dsa": json.loads("""{
      "head_dim": 192, "hidden_size": 6144, "index_n_heads": 32, "index_share_for_mtp_iteration": true,
      "index_skip_topk_offset": 3, "index_topk_freq": 4, "index_topk_pattern": null, "indexer_rope_interleave": true,
      "intermediate_size": 12288, "max_position_embeddings": 1048576, "n_group": 1, "num_attention_heads": 64,
      "num_hidden_layers": 78, "num_key_value_heads": 64, "q_lora_rank": 2048, "qk_head_dim": 256,
      "qk_nope_head_dim": 192, "rms_norm_eps": 1e-5, "rope_interleave": true,
      "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"}, "topk_group": 1, "v_head_dim": 256,
      "vocab_size": 154880
    }"""),
}
"""The fields of the config.json of DeepSeek V3.2, without fp8, and of GLM-5.2."""


@built
@pytest.mark.parametrize("model_type", PUBLISHED)
def test_a_published_config_is_read_and_written_back(model_type, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LATENT, **PUBLISHED[model_type], "model_type": model_type}))
    hf = read_hf(tmp_path)
    table = architecture_of(hf).fields
    config = to_transformer_config(hf, table, dims=mb.ParallelDims(tp=8, ep=16, sp=True))
    assert (config.experimental_attention_variant, config.dsa_indexer_loss_coeff) == ("dsa", 0.0)
    assert config.moe_layer_freq == [0] * 3 + [1] * (hf.num_hidden_layers - 3)
    assert (config.dsa_indexer_topk_freq, config.dsa_indexer_skip_topk_offset) == (
        (4, 3) if model_type == "glm_moe_dsa" else (1, 0)
    )
    back = to_hf_config(config, to_gpt_arguments(hf, table), table)
    back.pop("rope_parameters")
    assert {name: hf.to_dict()[name] for name in back} == back


@built
def test_layers_are_spelled_as_any_transformers_does():
    hf = zoo.cases()["deepseek_v32"].hf
    for spelling in ("indexed_attention", "deepseek_sparse_attention"):
        hf.layer_types = [spelling] * hf.num_hidden_layers
        assert to_transformer_config(hf, architecture_of(hf).fields).experimental_attention_variant == "dsa"


@built
def test_a_published_pipeline_starts_each_stage_with_an_indexer():
    """GLM-5.2 in four stages: 78 layers, and layers 2, 6, 10 and so on select also for the three layers after them."""
    hf = CONFIG_MAPPING["glm_moe_dsa"](**{**LATENT, **PUBLISHED["glm_moe_dsa"]})
    sizes = {"pp": 4, "tp": 8, "sp": True, "ep": 8}
    with pytest.raises(MeshError, match="starts with layer 19, which shares the selection"):
        mb.to_transformer_config(hf, dims=mb.ParallelDims(**sizes, layout="Et*19|t*20|t*20|t*19L"))
    mb.to_transformer_config(hf, dims=mb.ParallelDims(**sizes, layout="Et*18|t*20|t*20|t*20L"))


REFUSED = {
    "attention_dropout must be": {"attention_dropout": 0.1},
    "layer_types must be 'indexed_attention'": {"layer_types": ["indexed_attention"] * 3 + ["full_attention"]},
    "indexer_types must name one of": {"indexer_types": ["shared", "full", "full", "full"]},
    "indexer_types must repeat": {"indexer_types": ["full", "shared", "full", "full"]},
    "must agree for each layer": {"indexer_types": ["full", "shared", "full", "shared"], "index_topk_freq": 4},
    "indexer_rope_interleave must be True": {"indexer_rope_interleave": False},
    "moe_layer_freq must be 1": {"moe_layer_freq": 2},
    "first_k_dense_replace=1 and mlp_layer_types": {"mlp_layer_types": ["sparse"] * 4},
}


@built
@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_reproduced_is_refused(message):
    hf = sparse("glm_moe_dsa", **{**GROUPED, **REFUSED[message]}).hf
    with pytest.raises(ConfigError, match=message):
        mb.to_transformer_config(hf)


@built
def test_meshes_that_megatron_core_cannot_build_are_refused():
    shared = zoo.cases()["glm_moe_dsa-shared"].hf
    with pytest.raises(MeshError, match="needs sp=True"):
        mb.to_transformer_config(shared, dims=mb.ParallelDims(tp=2))
    with pytest.raises(MeshError, match="pp_rank=1, vp_stage=0 starts with layer 1, which shares"):
        mb.to_transformer_config(shared, dims=mb.ParallelDims(pp=4))
    shared.num_nextn_predict_layers = 2
    with pytest.raises(MeshError, match="mtp_num_layers must be 1, found 2"):
        mb.to_transformer_config(shared, overrides={"mtp_num_layers": 2})


@built
def test_recomputing_attention_is_refused_where_layers_share_a_selection():
    for overrides in ({"recompute_granularity": "selective"}, {**FULL, "recompute_granularity": "full"}):
        with pytest.raises(ConfigError, match="attention must not be recomputed"):
            mb.to_layer_spec(zoo.cases()["glm_moe_dsa-shared"].hf, backend="torch", overrides=overrides)
        mb.to_layer_spec(zoo.cases()["glm_moe_dsa"].hf, backend="torch", overrides=overrides)


FULL = {"recompute_method": "uniform", "recompute_num_layers": 1}


def test_an_older_release_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(installed, "megatron_release", lambda: "0.16.1")
    hf = sparse("deepseek_v32", **GROUPED).hf
    with pytest.raises(
        ConfigError, match=r"deepseek_v32 needs megatron-core 0\.19\.2 or later, found 0\.16\.1: .*bf16"
    ):
        mb.to_transformer_config(hf)
    hf.hidden_act = "unknown"  # the error names both obstacles
    with pytest.raises(ConfigError, match=r"(?s)deepseek_v32 needs megatron-core.*\nhidden_act must be"):
        mb.to_transformer_config(hf)


@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 6))
def test_what_layers_share_comes_back(num_layers, freq, offset):
    shared = [shares_selection(layer, freq=freq, offset=offset) for layer in range(num_layers)]
    hf = {"num_hidden_layers": num_layers, "indexer_types": [("full", "shared")[each] for each in shared]}
    found = {"num_layers": num_layers, **SHARING.to_mcore(hf)}
    assert SHARING.to_hf(found) == {"indexer_types": hf["indexer_types"]}
    schedule = {"index_topk_freq": freq, "index_skip_topk_offset": max(offset, 1)}  # transformers counts as mcore does
    letters = "".join("FS"[each] for each in shared)
    for fields in (schedule, {"index_topk_pattern": letters}, {"index_topk_pattern": [*letters]}):
        assert SHARING.to_mcore({**hf, **fields}) == SHARING.to_mcore(hf)


@built
@given(st.integers(1, 30), st.integers(1, 6), st.integers(0, 6))
def test_megatron_core_shares_alike(layer, freq, offset):
    from megatron.core.transformer.experimental_attention_variant.dsa import is_dsa_skip_topk_layer

    assert is_dsa_skip_topk_layer(layer, offset, freq) == shares_selection(layer - 1, freq=freq, offset=offset)


@built
@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_only_a_loss_of_its_own_trains_the_indexer(coefficient):
    dims, overrides = mb.ParallelDims(), {"dsa_indexer_loss_coeff": coefficient}
    with rank_of(dims, 0, 1):
        (model,) = mb.build_model(
            zoo.cases()["glm_moe_dsa-shared"].hf, dims=dims, device="meta", load_weights=False, overrides=overrides
        )
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    indexers = {name for name, _ in model.named_parameters() if ".indexer." in name}
    assert {name.split(".")[2] for name in indexers} == {"0", "2"}
    assert trained == {name for name, _ in model.named_parameters()} - (set() if coefficient else indexers)


@built
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa-shared"])
@pytest.mark.parametrize("sizes", [{}, {"tp": 2, "sp": True, "ep": 2, "pp": 2}], ids=str)
def test_mtp_layers_go_round(name, sizes):
    """They have an indexer, even if the last layer of the decoder shares the selection of the layer before it."""
    fields = {**zoo.cases()[name].fields, "num_nextn_predict_layers": 1}
    hf = zoo.Case(zoo.cases()[name].model_type, fields).hf
    state = mtp_checkpoints.published(hf)
    goes_round(hf, state, mb.ParallelDims(**sizes), 1)
