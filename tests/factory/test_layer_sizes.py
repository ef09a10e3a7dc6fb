"""Layers of different sizes: they train as in transformers, also recomputed, and each size must fit the mesh."""

import copy
import json
import pickle
from typing import Any

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge.architecture import architecture_of, read_hf
from mcore_bridge.config.layer_kinds import layer_config
from mcore_bridge.config.transformer import to_gpt_arguments, to_hf_config, to_transformer_config
from mcore_bridge.errors import ConfigError, MeshError
from mcore_bridge.factory.blueprint import BuildOptions, make_blueprint
from mcore_bridge.factory.hybrid_support import require_hybrid
from mcore_bridge.factory.param_count import count_params
from mcore_bridge.launch.fake_rank import rank_of
from mcore_bridge.trainers.rlinf.rules import convertor_rules
from mcore_bridge.weights.provenance import provenance_of
from tests import zoo
from tests.support.bounds import ONE
from tests.support.published import records
from tests.support.strategies import random_state
from tests.support.training import WHOLE, Kind, check_recompute

CASES = zoo.here(
    [
        *("laguna", "afmoe", "laguna-elements-yarn-bias", "gemma4", "gemma4-biased", "gemma4-experts", "step3p5"),
        *("mimo_v2_flash", "gemma4-shared", "mimo_v2_flash-biased", "gemma4-shared-biased"),
        *("inkling", "inkling-three-shared"),
    ]
)
pytestmark = pytest.mark.skipif(not CASES, reason="this transformers has no such families")
MESHES: dict[int, list[dict[str, Any]]] = {
    2: [{"tp": 2, "sp": True}, {"pp": 2, "vp": 2}, {"cp": 2}, {"ep": 2}, {"tp": 2, "etp": 2, "sp": True}],
    4: [{"tp": 4, "sp": True}, {"tp": 2, "cp": 2, "ep": 2, "sp": True}],
}
SHARED = ("gemma4-shared", "gemma4-shared-biased")
KIND = Kind(
    {name: zoo.cases()[name].hf for name in CASES},
    MESHES,
    every=2,
    fits=lambda name, dims: (
        (dims.ep == 1 or name not in ("gemma4", "gemma4-biased", *SHARED)) and (dims.pp == 1 or name not in SHARED)
    ),
)


@pytest.mark.parametrize("world_size", MESHES)
def test_every_mesh_trains_as_transformers_does(world_size, tmp_path):
    KIND.check(world_size, tmp_path)


RECOMPUTED = [
    ("laguna", ["core_attn", "moe"]),
    ("gemma4", ["core_attn", "mlp"]),
    ("gemma4-experts", ["core_attn", "shared_experts"]),
    ("step3p5", ["core_attn", "shared_experts"]),
    ("mimo_v2_flash", ["core_attn", "moe"]),
    ("inkling", ["core_attn", "mlp", "shared_experts"]),
    ("inkling-three-shared", ["moe"]),
    ("gemma4-shared", ["core_attn", "mlp"]),
]


@pytest.mark.parametrize(("name", "modules"), RECOMPUTED)
def test_recompute_changes_nothing(name, modules, tmp_path):
    exact = name != "inkling"  # it has no rope between norms and core attention
    check_recompute(zoo.cases()[name].hf, modules, tmp_path, whole=name not in SHARED, exact=exact)


@pytest.mark.skipif("gemma4-shared" not in CASES, reason="this transformers has no such family")
def test_layers_that_read_more_than_hidden_states_are_not_recomputed_nor_dealt_to_stages():
    hf, whole = zoo.cases()["gemma4-shared"].hf, {"overrides": WHOLE, "load_weights": False}
    with rank_of(ONE, 0, 1), pytest.raises(ConfigError, match="recompute_granularity must not be 'full' for layers"):
        mb.build_model(hf, dims=ONE, device="cpu", **whole)
    with pytest.raises(MeshError, match="pp=2 must be 1: each layer has an input from the embeddings of tokens"):
        make_blueprint(hf, BuildOptions(device="cpu", dims=mb.ParallelDims(pp=2)))
    embedded = {"input_ids": None, "position_ids": None, "attention_mask": None, "decoder_input": torch.ones(4, 1, 48)}
    with rank_of(ONE, 0, 1):
        (model,) = mb.build_model(hf, dims=ONE, device="cpu", dtype="float32", load_weights=False)
        with pytest.raises(ConfigError, match="a forward must embed its tokens in this model"):
            model(**embedded)


@pytest.mark.skipif("inkling" not in CASES, reason="this transformers has no such family")
def test_padding_before_a_text_does_not_reach_it_through_convolutions():
    hf = zoo.cases()["inkling"].hf
    with rank_of(ONE, 0, 1):
        (model,) = mb.build_model(hf, dims=ONE, device="cpu", dtype="float32", load_weights=random_state(hf))
        ids, places = torch.arange(1, 13)[None], torch.arange(15)[None]
        mask = (places >= 3).long()
        with torch.no_grad():
            plain = model.eval()(ids, places[:, :12], None)
            padded = model(torch.nn.functional.pad(ids, (3, 0), value=40), places, mask)[:, 3:]
    torch.testing.assert_close(padded, plain)


LAGUNA = json.loads("""{
  "model_type": "laguna", "architectures": ["LagunaForCausalLM"], "vocab_size": 100352, "hidden_size": 2048,
  "intermediate_size": 8192, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
  "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "tie_word_embeddings": false,
  "sliding_window": 512, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
  "num_experts_per_tok": 8, "num_experts": 256, "num_hidden_layers": 40, "moe_routed_scaling_factor": 2.5
}""")
EVERY_FOURTH = {
    "layer_types": ["full_attention", *["sliding_attention"] * 3] * 10,
    "num_attention_heads_per_layer": [48, 64, 64, 64] * 10,
}


def test_layers_of_a_large_model_have_their_sizes(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LAGUNA, **EVERY_FOURTH}))
    hf = read_hf(tmp_path)
    table = architecture_of(hf).fields
    config = to_transformer_config(hf, table, dims=mb.ParallelDims(tp=8, ep=16, sp=True))
    assert [layer_config(config, number).num_attention_heads for number in range(5)] == [48, 64, 64, 64, 48]
    assert layer_config(config, 4) is config
    again = pickle.loads(pickle.dumps(copy.deepcopy(config.get_config_for_layer(2))))
    assert (type(again), again.num_attention_heads) == (type(config), 64)
    assert (config.hf_rope.rotary_dim, config.hf_sliding_rope.rotary_dim) == (64, 128)
    back = to_hf_config(config, to_gpt_arguments(hf, table), table)
    back.pop("rope_parameters")
    assert back.pop("gating") == "per-head"
    assert {name: hf.to_dict().get(name, True) for name in back} == back  # no file has norm_topk_prob


def test_a_mesh_must_fit_the_sizes_of_every_layer():
    hf = zoo.cases()["laguna-elements-yarn-bias"].hf
    hf.num_attention_heads_per_layer = [4, 8, 6, 16]
    with pytest.raises(MeshError, match="tp=4 must divide num_attention_heads=6"):
        to_transformer_config(hf, architecture_of(hf).fields, dims=mb.ParallelDims(tp=4, sp=True))


def test_a_hybrid_model_is_refused():
    architecture = architecture_of("laguna")
    config = to_transformer_config(zoo.cases()["laguna"].hf, architecture.fields)
    with pytest.raises(ConfigError, match=r"its attention layers differ in .*sizes"):
        require_hybrid(architecture, config, positions="rope", vision="text_only")


def test_the_convertor_of_rlinf_refuses_them():
    with pytest.raises(ConfigError, match="must have one size here"):
        convertor_rules(zoo.cases()["laguna"].hf)


def test_fewer_layers_keep_their_sizes():
    hf = zoo.cases()["laguna"].hf
    cut = make_blueprint(hf, BuildOptions(device="cpu", overrides={"num_layers": 3})).hf
    assert cut.num_attention_heads_per_layer == [16, 8, 16]


STEP = json.loads("""{
  "model_type": "step3p5", "architectures": ["Step3p5ForCausalLM"], "hidden_size": 4096, "intermediate_size": 11264,
  "num_hidden_layers": 45, "num_nextn_predict_layers": 3, "vocab_size": 128896, "torch_dtype": "bfloat16",
  "num_attention_heads": 64, "num_attention_groups": 8, "head_dim": 128, "max_seq_len": 262144,
  "max_position_embeddings": 262144, "sliding_window": 512, "moe_num_experts": 288, "moe_top_k": 8,
  "moe_intermediate_size": 1280, "share_expert_dim": 1280, "moe_router_scaling_factor": 3.0, "zero_centered": true,
  "attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 8, "head_dim": 128},
  "rope_scaling": {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 131072,
    "low_freq_factor": 1.0, "high_freq_factor": 32.0},
  "yarn_only_types": ["full_attention"], "use_head_wise_attn_gate": true, "moe_router_activation": "sigmoid"
}""")
"""The published Step-3.5-Flash, without its lists, which repeat with every fourth layer."""
LISTS = {
    "layer_types": ["full_attention", *["sliding_attention"] * 3] * 12,
    "rope_theta": [5e6, 1e4, 1e4, 1e4] * 12,
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * 12,
    "swiglu_limits": [0.0] * 43 + [7.0, 7.0] + [0.0] * 3,
    "swiglu_limits_shared": [0.0] * 44 + [16.0] + [0.0] * 3,
    "moe_layers_enum": ",".join(map(str, range(3, 45))),
}


@pytest.mark.skipif("step3p5" not in CASES, reason="this transformers has no such family")
def test_the_published_step3p5_has_its_heads_and_limits_by_layer(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**STEP, **LISTS}))
    hf = read_hf(tmp_path)
    table = architecture_of(hf).fields
    config = to_transformer_config(hf, table, dims=mb.ParallelDims(tp=8, ep=16, sp=True))
    layers = [layer_config(config, number) for number in range(45)]
    assert [each.num_attention_heads for each in layers[:5]] == [64, 96, 96, 96, 64]
    assert [(each.glu_limit, each.expert_glu_limit) for each in layers[42:]] == [(None, None), (None, 7.0), (16.0, 7.0)]
    assert (config.hf_rope.rotary_dim, config.hf_sliding_rope.rotary_dim) == (64, 128)
    assert sum(count_params(hf).layers) == 12 * 4096 * (64 * (2 * 128 + 1)) + 33 * 4096 * (96 * (2 * 128 + 1)) + 45 * (
        4096 * 2 * 8 * 128 + 2 * 4096 + 2 * 128
    ) + 3 * 3 * 4096 * 11264 + 42 * (289 * 3 * 4096 * 1280 + 288 * 4096 + 288)
    back = to_hf_config(config, to_gpt_arguments(hf, table), table)
    given = hf.to_dict()
    assert {name for name in back.keys() & given.keys() if back[name] != given[name]} == {"rope_parameters"}


@pytest.mark.skipif("step3p5" not in CASES, reason="this transformers has no such family")
@pytest.mark.parametrize("limits", [[0.3, None], [0.3, None, -1.0, 0.0]])
def test_limits_that_no_gate_can_have_are_refused(limits):
    hf = zoo.cases()["step3p5"].hf
    hf.swiglu_limits = limits
    with pytest.raises(ConfigError, match="swiglu_limits must be None, or have a positive number"):
        make_blueprint(hf, BuildOptions(device="cpu"))


@pytest.mark.skipif("step3p5" not in CASES, reason="this transformers has no such family")
def test_limits_come_back_also_without_a_value_for_a_layer():
    hf = zoo.cases()["step3p5"].hf
    hf.swiglu_limits = [None, 0, 0.25, 0.0]
    cut = make_blueprint(hf, BuildOptions(device="cpu", overrides={"num_layers": 3})).hf
    assert cut.swiglu_limits == [0.0, 0.0, 0.25]
    assert cut.to_dict()["per_layer_config"] == {"0": {"num_attention_heads": 16}, "2": {"num_attention_heads": 16}}


@pytest.mark.skipif("mimo_v2_flash" not in CASES, reason="this transformers has no such family")
def test_an_override_of_mimo_v2_flash_reaches_the_names_that_engines_read(tmp_path):
    (published,) = (each for each in records() if each.name == "XiaomiMiMo/MiMo-V2-Flash")
    hf = provenance_of(published.write(tmp_path)).hf
    config = to_transformer_config(hf, architecture_of(hf).fields, dims=mb.ParallelDims(tp=8, ep=16, sp=True))
    layers = [layer_config(config, number) for number in (0, 1)]
    assert [(each.num_query_groups, each.softmax_type) for each in layers] == [(4, "vanilla"), (8, "learnable")]
    assert (config.kv_channels, config.value_channels, config.hf_rope.rotary_dim) == (192, 128, 64)
    assert (config.window_size, config.value_scale) == ((128, 0), 0.707)
    changes = {"num_layers": 3, "window_size": (63, 0), "rotary_base": 7.0}
    cut = make_blueprint(hf, BuildOptions(device="cpu", overrides=changes)).hf
    assert (cut.hybrid_layer_pattern[:3], cut.moe_layer_freq[:3]) == ([0, 1, 1], [0, 1, 1])
    assert (cut.sliding_window, cut.sliding_window_size, cut.rope_theta) == (64, 63, 7.0)
    hf.swa_num_key_value_heads = 4
    with pytest.raises(ConfigError, match=r"swa_num_key_value_heads must be \['8'\].* engines would read"):
        make_blueprint(hf, BuildOptions(device="cpu"))


GEMMA4 = json.loads("""{
  "model_type": "gemma4_text", "attention_k_eq_v": true, "final_logit_softcapping": 30.0, "global_head_dim": 512,
  "head_dim": 256, "hidden_size": 5376, "hidden_size_per_layer_input": 0, "intermediate_size": 21504,
  "max_position_embeddings": 262144, "num_attention_heads": 32, "num_global_key_value_heads": 4,
  "num_hidden_layers": 60, "num_key_value_heads": 16, "sliding_window": 1024, "tie_word_embeddings": true,
  "use_bidirectional_attention": "vision"
}""")
"""The text of the published 31B."""


@pytest.mark.skipif("gemma4" not in CASES, reason="this transformers has no such family")
def test_full_layers_of_gemma4_have_no_rows_of_values(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA4))
    hf = read_hf(tmp_path)
    table = architecture_of(hf).fields
    config = to_transformer_config(hf, table, dims=mb.ParallelDims(tp=8, sp=True))
    sizes = [layer_config(config, number) for number in (4, 5)]
    assert [(each.kv_channels, each.num_query_groups, each.keys_as_values) for each in sizes] == [
        (256, 16, False),
        (512, 4, True),
    ]
    full = config.hf_rope.frequencies()
    assert (config.hf_sliding_rope.rotary_dim, len(full), int(full.count_nonzero())) == (256, 256, 64)
    back = to_hf_config(config, to_gpt_arguments(hf, table), table)
    assert {name: hf.to_dict()[name] for name in back} == back
    assert sum(count_params(hf).layers) == 60 * (4 * 5376 + 3 * 5376 * 21504 + 1) + 50 * (
        5376 * 256 * (2 * 32 + 2 * 16) + 2 * 256
    ) + 10 * (5376 * 512 * (2 * 32 + 4) + 2 * 512)


@pytest.mark.skipif("gemma4" not in CASES, reason="this transformers has no such family")
def test_experts_beside_an_mlp_have_the_published_sizes(tmp_path):
    """An override must set both sizes of the MLP, for which HF has one field."""
    (published,) = (each for each in records() if each.name == "google/gemma-4-26B-A4B")
    hf = provenance_of(published.write(tmp_path)).hf
    counts = count_params(hf)
    hidden, of_experts = 2816, 30 * 128 * 3 * 2816 * 704
    beside = 30 * (hidden * (3 * 2112 + 7 + 128 + 1) + 128 + 1)  # the MLP, norms, the router, its scales, and a scale
    sliding, full = hidden * 256 * (2 * 16 + 2 * 8) + 2 * 256, hidden * 512 * (2 * 16 + 2) + 2 * 512
    assert sum(counts.experts) == of_experts
    assert counts.total == of_experts + beside + 25 * sliding + 5 * full + (262144 + 1) * hidden
    table = architecture_of(hf).fields
    config = to_transformer_config(hf, table, dims=mb.ParallelDims(ep=8, tp=2, sp=True))
    back = to_hf_config(config, to_gpt_arguments(hf, table), table)
    assert {name: hf.to_dict()[name] for name in back} == back
    wider = {"ffn_hidden_size": 4096}
    with pytest.raises(ConfigError, match="moe_shared_expert_intermediate_size must be ffn_hidden_size=4096, found"):
        make_blueprint(hf, BuildOptions(device="cpu", overrides=wider))
    wider["moe_shared_expert_intermediate_size"] = 4096
    assert make_blueprint(hf, BuildOptions(device="cpu", overrides=wider)).hf.intermediate_size == 4096
    overlapping = {"overrides": {"moe_shared_expert_overlap": True}, "load_weights": False}
    with rank_of(ONE, 0, 1), pytest.raises(ConfigError, match="moe_shared_expert_overlap must be False"):
        mb.build_model(zoo.cases()["gemma4-experts"].hf, dims=ONE, device="cpu", **overlapping)


E2B = json.loads("""{
  "model_type": "gemma4_text", "hidden_size": 1536, "num_hidden_layers": 35, "intermediate_size": 6144,
  "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512, "vocab_size": 262144,
  "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 20,
  "use_double_wide_mlp": true, "sliding_window": 512, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6
}""")


@pytest.mark.skipif("gemma4-shared" not in CASES, reason="this transformers has no such family")
def test_last_layers_of_e2b_read_keys_of_two_layers_and_files_may_have_their_own(tmp_path):
    kinds = (["sliding_attention"] * 4 + ["full_attention"]) * 7
    (tmp_path / "config.json").write_text(json.dumps({**E2B, "layer_types": kinds}))
    hf = read_hf(tmp_path)
    table = architecture_of(hf).fields
    config = to_transformer_config(hf, table, dims=mb.ParallelDims(tp=4, sp=True))
    layers = [layer_config(config, number) for number in range(35)]
    assert [each.keys_of_layer for each in layers] == [None] * 13 + [13, 14] + [13, 13, 13, 13, 14] * 4
    assert [each.ffn_hidden_size for each in layers] == [6144] * 15 + [12288] * 20
    back = to_hf_config(config, to_gpt_arguments(hf, table), table)
    assert {name: hf.to_dict()[name] for name in back} == back
    inputs, mlps = 2 * 1536 * 256 + 1536, 3 * 1536 * 6144 * (15 + 2 * 20)
    of_keys = 1536 * 2 * (12 * 256 + 3 * 512) + 12 * 256 + 3 * 512
    queries = 28 * 256 * (2 * 8 * 1536 + 1) + 7 * 512 * (2 * 8 * 1536 + 1)
    assert sum(count_params(hf).layers) == 35 * (inputs + 4 * 1536 + 1) + mlps + of_keys + queries
    cut = make_blueprint(hf, BuildOptions(device="cpu", overrides={"num_layers": 20})).hf
    assert (cut.num_kv_shared_layers, cut.use_double_wide_mlp) == (5, True)
    small = zoo.cases()["gemma4-shared"].hf
    state = random_state(small)
    unread = {f"model.layers.3.self_attn.{name}.weight": torch.ones(3) for name in ("k_proj", "v_proj", "k_norm")}
    with rank_of(ONE, 0, 1):
        (model,) = mb.build_model(small, dims=ONE, device="cpu", dtype="float32", load_weights={**state, **unread})
        assert {name for name, _ in mb.iter_hf_weights([model])} == {*state} - {"lm_head.weight"}


@pytest.mark.skipif("gemma4" not in CASES, reason="this transformers has no such family")
@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size_per_layer_input": 20, "vocab_size_per_layer_input": 7},
        {"num_kv_shared_layers": 2},
        {"use_bidirectional_attention": "all"},
    ],
    ids=min,
)
def test_other_variants_of_gemma4_are_refused_by_the_name_of_a_field(change):
    hf = zoo.Case("gemma4_text", {**zoo.cases()["gemma4"].fields, **change}).hf
    with pytest.raises(ConfigError) as caught:
        make_blueprint(hf, BuildOptions(device="cpu"))
    assert all(name in str(caught.value) for name in change)


@pytest.mark.skipif("gemma4" not in CASES, reason="this transformers has no such family")
def test_experts_may_be_added_where_transformers_has_them():
    added = {"num_moe_experts": 4, "moe_ffn_hidden_size": 8, "moe_router_topk": 2}
    hf = zoo.cases()["gemma4"].hf
    added["moe_shared_expert_intermediate_size"] = hf.intermediate_size
    changed = make_blueprint(hf, BuildOptions(device="cpu", overrides=added)).hf
    assert (changed.enable_moe_block, changed.num_experts, changed.top_k_experts) == (True, 4, 2)
    with pytest.raises(ConfigError, match="num_moe_experts"):
        make_blueprint(zoo.cases()["gemma4-unified"].hf, BuildOptions(device="cpu", overrides=added))


@pytest.mark.skipif("gemma4" not in CASES, reason="this transformers has no such family")
def test_fewer_layers_keep_their_kinds():
    cut = make_blueprint(zoo.cases()["gemma4"].hf, BuildOptions(device="cpu", overrides={"num_layers": 2})).hf
    assert cut.layer_types == ["sliding_attention", "full_attention"]
    assert cut.to_dict()["per_layer_config"] == {"1": {"head_dim": 32, "num_key_value_heads": 2}}
