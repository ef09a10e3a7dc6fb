"""Latent attention: published configs, refusals with their reasons, and layers that are not built."""

import json

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge.architecture import architecture_of, read_hf
from mcore_bridge.config.transformer import to_gpt_arguments, to_hf_config, to_transformer_config
from mcore_bridge.errors import CheckpointError, ConfigError
from mcore_bridge.rules.names import Numbering, canonical
from tests import zoo
from tests.support import pool
from tests.support.bounds import BOUND
from tests.support.parity import reference_logits, worst_differences
from tests.support.strategies import random_state
from tests.zoo.latent import DENSE, latent

YARN = {"factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
PUBLISHED = json.loads("""{
  "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "auto_map":
  {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001, "bos_token_id": 0,
  "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
  "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
  "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
  "norm_topk_prob": true, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
  "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "pretraining_tp": 1, "q_lora_rank": 1536,
  "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000,
  "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": true, "tie_word_embeddings": false,
  "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": true, "v_head_dim": 128,
  "vocab_size": 129280
}""")
"""The fields of the config.json of DeepSeek V3, without rope and fp8. Kimi K2 has other sizes."""
SCALED_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize("model_type", ["deepseek_v3", "kimi_k2"])
def test_a_published_config_is_read_and_written_back(model_type, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({**PUBLISHED, "rope_scaling": {"type": "yarn", **SCALED_YARN}, "model_type": model_type})
    )
    hf = read_hf(tmp_path)
    table = architecture_of(hf).fields
    config = to_transformer_config(hf, table, dims=mb.ParallelDims(tp=8, ep=16, sp=True))
    assert (config.rotary_scaling_factor, config.mscale_all_dim, config.hf_rope.attention_factor) == (40.0, 1.0, 1.0)
    assert config.moe_layer_freq == [0] * 3 + [1] * 58
    back = to_hf_config(config, to_gpt_arguments(hf, table), table)
    unmapped = {"rope_parameters", "rope_scaling", "rope_theta"}
    assert {name: hf.to_dict()[name] for name in back if name not in unmapped} == {
        name: value for name, value in back.items() if name not in unmapped
    }


REFUSED = {
    "num_key_value_heads must be 8": {"num_key_value_heads": 4},
    "head_dim must be 8": {"head_dim": 16},
    "attention_bias must be False": {"attention_bias": True},
    "rope_interleave must be True": {"rope_interleave": False},
    "rope_interleave must be True, found None": {"rope_interleave": None},
    "norm_topk_prob must be True": {"norm_topk_prob": False},
    "norm_topk_prob must be False": {"num_experts_per_tok": 1},
    "must be twice topk_group=2": {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 2},
    "scoring_func must be": {"scoring_func": "softmax"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_reproduced_is_refused(message):
    hf = latent("deepseek_v3", **{**DENSE, **REFUSED[message]}).hf
    with pytest.raises(ConfigError, match=message):
        mb.to_transformer_config(hf)


@pytest.mark.parametrize("family", zoo.params(("minimax_m2", "hy_v3")))
def test_weights_that_add_up_to_one_are_of_several_experts(family):
    hf = zoo.cases()[family].hf
    assert "norm_topk_prob" not in hf.to_dict()
    hf.num_experts_per_tok = 1
    with pytest.raises(ConfigError, match="norm_topk_prob must be False with num_experts_per_tok=1, found True"):
        mb.to_transformer_config(hf)


def test_group_limited_greedy_is_refused_where_groups_would_rank_otherwise():
    fields = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
    with pytest.raises(ConfigError, match="less than twice topk_group=2"):
        mb.to_transformer_config(latent("deepseek_v2", **fields).hf)


def test_overrides_keep_the_rope_of_the_config():
    hf = zoo.cases()["deepseek_v3-yarn"].hf
    config = mb.to_transformer_config(hf, overrides={"rotary_base": 500.0, "kv_lora_rank": 24, "rope_type": "yarn"})
    assert (config.hf_rope.theta, config.rotary_base, config.kv_lora_rank) == (500.0, 500.0, 24)
    assert mb.to_transformer_config(hf, overrides={"qk_pos_emb_head_dim": 16}).hf_rope.head_dim == 16
    for overrides in ({"rope_type": "rope"}, {"mscale_all_dim": 0.0}, {"rotary_scaling_factor": 8.0}):
        with pytest.raises(ConfigError, match="change the rope of the HF config"):
            mb.to_transformer_config(hf, overrides=overrides)
    with pytest.raises(ConfigError, match="An override must be"):
        mb.to_transformer_config(zoo.cases()["llama"].hf, overrides={"q_lora_rank": 8})


def loads_with_another_layer(hf, number):
    state = {**random_state(hf), f"model.layers.{number}.eh_proj.weight": torch.ones(2, 2)}
    mb.ParallelDims().initialize(device="cpu")
    mb.build_model(hf, dims=mb.ParallelDims(), device="cpu", dtype=torch.float32, load_weights=state)


@pytest.mark.parametrize("name", zoo.params(("deepseek_v3", "glm_moe_dsa")))
def test_latents_that_tp_does_not_divide_are_whole_on_every_rank(name):
    """mcore's own layers would cut 28 and 20 + 8 rows."""
    hf = zoo.cases()[name].hf
    hf.num_attention_heads = hf.num_key_value_heads = 9
    hf.n_shared_experts, hf.intermediate_size = 3, 72
    dims = mb.ParallelDims(tp=3, sp=True)
    ((worst,), *_) = pool.run(3, worst_differences, [(hf, dims, reference_logits(hf))])
    assert worst < BOUND


def test_the_layer_after_the_last_is_left_in_the_file_and_no_other():
    hf = zoo.cases()["deepseek_v3"].hf
    hf.num_nextn_predict_layers = 1
    pool.run(1, loads_with_another_layer, hf, 4)
    with pytest.raises(CheckpointError, match="unexpected"):
        pool.run(1, loads_with_another_layer, hf, 5)


def test_norms_that_transformer_engine_fuses_have_their_own_names():
    for latent_name in ("q", "kv"):
        fused = f"decoder.layers.0.self_attention.linear_{latent_name}_up_proj.layer_norm_weight"
        alone = f"decoder.layers.3.self_attention.{latent_name}_layernorm.weight"
        assert canonical(fused, Numbering((3,))) == alone


def test_the_scale_of_deepseek_v2_is_that_of_its_own_code():
    """transformers 4.57 ignores it, so the zoo compares logits with transformers 5 only."""
    rope = zoo.rope("yarn", **YARN, mscale=0.707, mscale_all_dim=0.707)
    config = mb.to_transformer_config(latent("deepseek_v2", **rope).hf)
    assert (config.rotary_scaling_factor, config.mscale_all_dim) == (40.0, 0.707)
