"""Overrides of HF configs are in the saved config, or raise; all overrides of trainers' examples are accepted."""

import json
import tempfile
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.functional import gelu, relu, silu

import mcore_bridge as mb
from mcore_bridge import BridgeError, ParallelDims
from mcore_bridge.config.apply_overrides import decided_by
from mcore_bridge.config.tables.derived import GELU_TANH
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.blueprint import Blueprint, BuildOptions, make_blueprint
from mcore_bridge.trainers.settings import require_same_model, split
from mcore_bridge.weights.model_tensors import held_tensors
from tests import zoo
from tests.support import pool, stepping
from tests.support.families import NOT_COMPARABLE, table_of
from tests.support.parity import tokens
from tests.support.strategies import tiny
from tests.support.trainer_calls import OVERRIDES

ONE = ParallelDims()
VALUES: dict[str, list[Any]] = {
    "num_layers": [1, 2, 3, 5],
    "hidden_size": [64, 96],
    "ffn_hidden_size": [72],
    "num_attention_heads": [4],
    "num_query_groups": [1, 4, 8, None],
    "kv_channels": [16, None],
    "share_embeddings_and_output_weights": [True, False],
    "layernorm_epsilon": [0.25],
    "init_method_std": [0.5],
    "attention_dropout": [0.25],
    "hidden_dropout": [0.25],
    "max_sequence_length": [40],
    "vocab_size": [120],
    "add_bias_linear": [True, False],
    "add_qkv_bias": [True, False],
    "qk_layernorm": [True, False],
    "normalization": ["RMSNorm", "LayerNorm"],
    "gated_linear_unit": [True, False],
    "activation_func": [silu, gelu, relu, GELU_TANH],
    "activation_func_clamp_value": [5.0],
    "softmax_scale": [0.5],
    "window_size": [(3, 0), [4, 0], None],
    "window_attn_skip_freq": [None, 2, [1, 0, 1, 0]],
    "linear_attention_freq": [2, [1, 0, 1, 0]],
    "no_rope_freq": [None, 2, [1, 0, 0, 1]],
    "rotary_base": [500, 500.0],
    "rotary_percent": [0.5, 1.0],
    "seq_len_interpolation_factor": [2.0],
    "rope_scaling": [True],
    "num_moe_experts": [6],
    "moe_ffn_hidden_size": [40],
    "moe_layer_freq": [1, 2, [0, 1, 1, 1], [0, 1, 0, 1]],
    "moe_router_topk": [1, 3],
    "moe_router_topk_scaling_factor": [2.0],
    "moe_router_pre_softmax": [True, False],
    "moe_router_score_function": ["sigmoid", "softmax"],
    "moe_router_num_groups": [2],
    "moe_router_group_topk": [1],
    "moe_shared_expert_intermediate_size": [48, 80, None],
    "moe_aux_loss_coeff": [0.5],
    "q_lora_rank": [None, 20],
    "kv_lora_rank": [20],
    "qk_head_dim": [12],
    "qk_pos_emb_head_dim": [12],
    "v_head_dim": [12],
    "dsa_indexer_topk": [5],
    "linear_num_value_heads": [4],
}
"""Overrides for any family. Each of them is in the HF config of some family, and most are in few."""
names = st.sampled_from(sorted(zoo.cases()))


@st.composite
def problems(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A case of the zoo and its overrides: most are fields that its table maps, some are fields of other tables."""
    case = draw(names)
    hf = zoo.cases()[case].hf
    own = sorted(VALUES.keys() & decided_by(table_of(hf), hf.to_dict()))
    name = st.sampled_from(own) | st.sampled_from(own) | st.sampled_from(sorted(VALUES))
    return case, {each: draw(st.sampled_from(VALUES[each])) for each in draw(st.lists(name, min_size=1, max_size=4))}


def drawn(hf: Any, overrides: dict[str, Any] | None = None) -> Blueprint:
    return make_blueprint(
        hf, BuildOptions(dims=ONE, dtype=torch.float32, device="cpu", backend="torch", overrides=overrides)
    )


def said(blueprint: Blueprint, free: set[str]) -> dict[str, Any]:
    """All settings of a model, except for settings that no HF config has."""
    found = {**vars(blueprint.config), **blueprint.gpt_arguments, "rules": blueprint.provenance.rules}
    return {name: value for name, value in found.items() if name not in free and name not in NOT_COMPARABLE}


@settings(max_examples=60)
@given(problems())
@example(("qwen3-bias-window", {"num_layers": 3}))
@example(("smollm3", {"num_layers": 3}))
@example(("llama-mha-derived-head-dim", {"hidden_size": 96, "kv_channels": 6}))
def test_an_override_comes_back_in_the_config_or_raises(problem: tuple[str, dict[str, Any]]) -> None:
    name, overrides = problem
    hf = zoo.cases()[name].hf
    try:
        blueprint = drawn(hf, overrides)
    except BridgeError:
        return
    free = overrides.keys() - decided_by(table_of(hf), hf.to_dict())
    with tempfile.TemporaryDirectory() as folder:
        blueprint.hf.save_pretrained(folder)
        assert said(drawn(folder), free) == said(blueprint, free)


# -- what is saved -----------------------------------------------------------------------------------------------------

SAVED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"num_layers": 2, "layernorm_epsilon": 0.25, "attention_dropout": 0.5, "moe_aux_loss_coeff": 0.5}),
    ("llama-yarn", {"rotary_base": 500, "max_sequence_length": 48, "share_embeddings_and_output_weights": True}),
    ("qwen3-bias-window", {"num_layers": 3, "num_attention_heads": 4, "kv_channels": 12}),
    ("smollm3", {"num_layers": 3, "no_rope_freq": 2}),
    ("gemma3", {"num_layers": 3, "hidden_size": 64, "softmax_scale": 0.5, "activation_func": gelu}),
    ("glm4_moe", {"qk_layernorm": False, "add_qkv_bias": False, "num_moe_experts": 6, "moe_layer_freq": [0, 0, 1, 1]}),
    ("mixtral", {"num_moe_experts": 6, "moe_router_topk": 3, "window_size": [4, 0]}),
    ("deepseek_v3", {"qk_pos_emb_head_dim": 12, "kv_lora_rank": 20, "num_layers": 3}),
]
SAYS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2, "rms_norm_eps": 0.25, "attention_dropout": 0.5},
    "qwen3-bias-window": {"layer_types": ["full_attention", "full_attention", "sliding_attention"], "head_dim": 12},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "glm4_moe": {"use_qk_norm": False, "attention_bias": False, "first_k_dense_replace": 2},
}
"""The expected fields of the saved config, unless they are obvious."""


def logits_of(chunk: Any, inputs: torch.Tensor) -> torch.Tensor:
    chunk.eval()
    with torch.no_grad():
        return chunk(inputs, torch.arange(inputs.shape[1]).expand_as(inputs), None)


def saved(problems: list[tuple[str, dict[str, Any]]], folder: str) -> list[tuple[str, list[str], float]]:
    """Runs in a worker: for each case, differences after a save, and the distance to transformers' logits."""
    from transformers import AutoModelForCausalLM

    found = []
    how: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    with stepping.mesh(ONE):
        for name, overrides in problems:
            hf, out = zoo.cases()[name].hf, Path(folder) / name
            hf.save_pretrained(out)
            (chunk,) = mb.build_model(hf, overrides=overrides, load_weights=False, **how)
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for parameter in chunk.parameters():
                    parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
            mb.save_hf_checkpoint([chunk], out, keep=True)
            (again,) = mb.build_model(out, **how)
            before, after = held_tensors([chunk]), held_tensors([again])
            wrong = [each for each in before.keys() | after.keys() if not torch.equal(before[each], after[each])]
            inputs = tokens(hf)
            ours, theirs = (
                logits_of(chunk, inputs),
                AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager", dtype=torch.float32).eval(),
            )
            wrong += [] if torch.equal(ours, logits_of(again, inputs)) else ["logits"]
            with torch.no_grad():
                expected = theirs(inputs).logits
            found.append((name, wrong, float((ours - expected).abs().max() / expected.std())))
    return found


def test_what_is_saved_loads_again_and_computes_the_same(tmp_path: Path) -> None:
    problems = [(name, overrides) for name, overrides in SAVED if zoo.here([name])]
    (found,) = pool.run(1, saved, problems, str(tmp_path))
    assert [name for name, wrong, far in found if wrong or not far < 2e-5] == [], found
    for name, fields in SAYS.items():
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert {each: config[each] for each in fields} == fields


NOT_SAID: list[tuple[str, dict[str, Any], list[str]]] = [
    ("llama", {"qk_layernorm": True, "add_qkv_bias": True}, ["qk_layernorm=True, expected False", "add_qkv"]),
    ("llama", {"softmax_scale": 0.5, "layernorm_epsilon": 0.5}, ["found softmax_scale=0.5, expected None. R"]),
    ("llama", {"num_layers": "two"}, ["found num_layers='two', expected "]),
    ("qwen3", {"num_attention_heads": 5}, ["num_attention_heads=5", "must be a multiple of num_key_value_heads"]),
    ("llama", {"num_layers": "2"}, ["num_layers='2', expected 4"]),
    ("qwen3", {"window_size": 7, "window_attn_skip_freq": 0}, ["window_attn_skip_freq must be a positive"]),
    ("qwen3", {"layernorm_epsilon": float("nan")}, ["layernorm_epsilon=nan, expected 1e-06"]),
    ("qwen2_moe", {"moe_shared_expert_intermediate_size": "x"}, ["moe_shared_expert_intermediate_size='x'"]),
    ("deepseek_v3", {"moe_layer_freq": [0, 1, 0, 1]}, ["moe_layer_freq must have dense layers first"]),
    ("deepseek_v3", {"moe_shared_expert_intermediate_size": 7}, ["=7 must be a multiple of 32, as HF counts"]),
    ("deepseek_v3", {"num_query_groups": 1}, ["num_query_groups must be num_attention_heads=8, found 1"]),
    ("gemma2", {"softmax_scale": "x"}, ["softmax_scale must be a number, found 'x'"]),
    ("gpt_oss", {"activation_func": torch.tanh}, ["activation_func must be megatron-core's quick_gelu, found"]),
    ("granitemoehybrid", {"ffn_hidden_size": 8}, ["ffn_hidden_size must be moe_ffn_hidden_size"]),
    ("llama", {"activation_func": torch.tanh}, ["activation_func must be one that HF has a name for (["]),
    ("llama4", {"moe_shared_expert_intermediate_size": 8}, ["HF has one intermediate_size for all"]),
    ("llama4", {"qk_layernorm": True}, ["qk_layernorm must be False, found True: these norms have no weights"]),
    ("mistral-window", {"window_attn_skip_freq": 2}, ["window_attn_skip_freq must be None, found 2"]),
    ("qwen2_moe", {"window_size": (4, 0)}, ["window_size must be None, found (4, 0)"]),
    ("cohere2_moe", {"moe_shared_expert_intermediate_size": 7}, ["=7 must be a multiple of"]),
    ("cohere2_moe", {"no_rope_freq": [1, 1, 1, 1]}, ["no_rope_freq must be [0, 0, 0, 1]: here only layers"]),
    ("falcon_h1", {"softmax_scale": "x"}, ["softmax_scale must be a number, found 'x'"]),
    ("nemotron_h", {"moe_layer_freq": [0, 0, 0, 0]}, ["moe_layer_freq must be [0, 1, 0, 0], as layers_block"]),
]
"""Cases, overrides, and the names in the error."""


@pytest.mark.parametrize(("name", "overrides", "messages"), zoo.params(NOT_SAID, itemgetter(0)))
def test_what_no_hf_config_can_say_is_named(name: str, overrides: dict[str, Any], messages: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        drawn(zoo.cases()[name].hf, overrides)
    assert [message for message in messages if message not in str(caught.value)] == []


# -- what trainers set -------------------------------------------------------------------------------------------------

VERL: dict[str, Any] = {
    **OVERRIDES,
    "attention_backend": "flash",
    "batch_p2p_comm": False,
    "moe_enable_routing_replay": True,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
    "overlap_p2p_comm": False,
    "variable_seq_lengths": True,
}
"""All settings of verl 0.9.1 itself, for both of its bridges. siiRL itself sets no fields of a model."""
EXAMPLES: dict[str, Any] = {
    "calculate_per_token_loss": True,
    "deallocate_pipeline_outputs": True,
    "masked_softmax_fusion": True,
    "moe_aux_loss_coeff": 0.01,
    "moe_router_bias_update_rate": 0.001,
    "moe_router_dtype": "fp64",
    "moe_shared_expert_overlap": False,
    "moe_z_loss_coeff": 0.001,
    "persist_layer_norm": True,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
"""Values of ``override_transformer_config`` in the examples of verl and siiRL that a CPU supports."""
RLINF = {"moe_router_load_balancing_type": "aux_loss", "init_method_std": 0.008, "hidden_dropout": 0.25}
"""Values of ``actor.model`` in RLinf's examples. No HF config has them, except for the second."""
SPARSE = tiny("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
"""All layers have experts, so RLinf sets the size of dense MLPs to the size of experts."""
TRAINERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "verl, dense": ("qwen2", {**VERL, **EXAMPLES}, {}),
    "verl, experts": ("qwen3_moe", {**VERL, **EXAMPLES}, {}),
    "verl, latent attention": ("deepseek_v3", {**VERL, **EXAMPLES}, {}),
    "verl, a critic of a tied model": (
        "qwen3-yarn-tied",
        {**VERL, "share_embeddings_and_output_weights": False},
        {"tie_word_embeddings": False},
    ),
    "RLinf, dense": (
        "qwen2",
        {**RLINF, "attention_dropout": 0.5},
        {"initializer_range": 0.008, "attention_dropout": 0.5},
    ),
    "RLinf, experts": (
        "sparse",
        {**RLINF, "moe_layer_freq": 1, "ffn_hidden_size": 16, "moe_router_topk": 2},
        {"initializer_range": 0.008, "intermediate_size": 16},
    ),
    "RLinf, latent attention": ("deepseek_v3", {"qk_layernorm": True, "vocab_size": 120}, {}),
}
"""For each case: settings of a trainer, and the fields of the HF config that they change."""


@pytest.mark.parametrize("trainer", TRAINERS)
def test_what_a_trainer_sets_is_taken(trainer: str) -> None:
    name, asked, comes_back = TRAINERS[trainer]
    hf = SPARSE if name == "sparse" else zoo.cases()[name].hf
    _, overrides = split(asked, ONE)
    overrides = require_same_model(hf, overrides, dtype=torch.float32)
    blueprint = drawn(hf, overrides)
    assert blueprint.provenance.overridden == comes_back
    latent = blueprint.config.multi_latent_attention
    taken = {**vars(blueprint.config), **blueprint.gpt_arguments}
    for each in overrides.keys() - {"moe_layer_freq"}:
        assert taken[each] == overrides[each], each
    assert not (latent and blueprint.config.qk_layernorm)


def test_rlinf_may_ask_for_another_number_of_experts_of_a_token() -> None:
    """``mcore_customization_config``: the only override of RLinf's examples that changes the model."""
    assert drawn(zoo.cases()["mixtral"].hf, {"moe_router_topk": 3}).provenance.overridden == {"num_experts_per_tok": 3}


def test_layers_with_experts_that_are_overridden_are_all_listed():
    """The config lists the layers with experts afterwards, even if it had a step before."""
    hf = zoo.cases()["qwen3_moe"].hf
    frequencies = [1, 0] * (hf.num_hidden_layers // 2)
    overrides = {"moe_layer_freq": frequencies}
    changed = make_blueprint(hf, BuildOptions(dims=mb.ParallelDims(), dtype=torch.float32, overrides=overrides)).hf
    assert changed.decoder_sparse_step == 1
    assert changed.mlp_only_layers == [layer for layer, sparse in enumerate(frequencies) if not sparse]
