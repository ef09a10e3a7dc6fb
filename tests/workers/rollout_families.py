"""Families in sizes that a rollout engine's kernels take, and fields of configs that vLLM reads and transformers lacks.

Published files have those fields; transformers drops or moves them.
"""

from collections.abc import Iterable
from typing import Any

from tests import zoo
from tests.support import twins
from tests.support.gpu_models import DENSE, EXPERTS, LATENT, LINEAR, SIZES, SPARSE
from tests.support.strategies import tiny
from tests.support.text_halves import COMPOSITES

SMALL = ("starcoder2", "smollm3", "seed_oss", "arcee-no-bias", "glm4", "exaone4", "gemma3", "gemma")
"""Families of the zoo that vLLM can read with other sizes, and with positions for all generated tokens."""
WIDE = {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 32}
NARROW = {name: {"hidden_size": 64} for name in ("gemma", "gemma3")}
"""Their embedding, which grows with the width and is the output layer too, would leave each time one token likely."""
ABSORBED = {
    **SIZES,
    **LATENT,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "v_head_dim": 128,
}
"""Latent attention in the only dims for which vLLM has kernels."""
HEADS_OF_M2 = {"head_dim": 128, "num_attention_heads": 48, "num_key_value_heads": 8}
"""The published size: for other sizes vLLM's kernel for norms over tensor-parallel heads does not write the keys."""
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LATENT_YARN = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}
"""Latent attention gets YaRN: without it, vLLM's kernel on CPU rotates a wrong part of the keys."""
MIXERS = {"mamba_num_heads": 8, "mamba_head_dim": 64, "n_groups": 2, "ssm_state_size": 128, "conv_kernel": 4}
NEWER: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        **SIZES,
        **EXPERTS,
        **MIXERS,
        "n_routed_experts": 8,
        "moe_shared_expert_intermediate_size": 256,
        "routed_scaling_factor": 2.5,
        "layers_block_type": ["linear_attention", "full_attention", "moe"] * 2,
    },
    "nemotron_h-dense": {
        **SIZES,
        **MIXERS,
        "layers_block_type": ["linear_attention", "full_attention", "mlp"] * 2,
    },
    "llama4_text": {
        **SIZES,
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 512,
        "intermediate_size": 128,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 128,
        "layer_types": ["chunked_attention", "chunked_attention", "chunked_attention", "full_attention"],
    },
}
"""Each stage of vLLM's pipelines must have layers of all kinds, and its kernels take chunks of 128 tokens."""
MIXED = {"falcon_h1": {"mamba_d_head": 64, "mamba_d_ssm": 512, "mamba_d_state": 128, "mamba_d_conv": 4}}
"""Sizes for which vLLM has kernels of Mamba."""
MINISTRAL_ROPE = {**YARN, "llama_4_scaling_beta": 0.4, "max_position_embeddings": 128}


def configs() -> dict[str, Any]:
    """HF configs by family; transformers must support all of the families."""
    return {
        **DENSE,
        **SPARSE,
        **{
            case.model_type: tiny(case.model_type, **{**case.fields, **WIDE, **NARROW.get(name, {})})
            for name, case in zoo.cases().items()
            if name in SMALL
        },
        "gemma2": tiny("gemma2", **SIZES, query_pre_attn_scalar=100, sliding_window=8, tie_word_embeddings=True),
        "nemotron": tiny("nemotron", **SIZES, attention_bias=True, mlp_bias=True),
        "ministral3": tiny("ministral3", **SIZES, rope_parameters=MINISTRAL_ROPE, sliding_window=None),
        "ernie4_5": tiny("ernie4_5", **SIZES, use_bias=False),
        "hunyuan_v1_dense": tiny("hunyuan_v1_dense", **SIZES),
        "olmo3": tiny("olmo3", **{**SIZES, "head_dim": 32}, sliding_window=8),
        "qwen3_next": tiny("qwen3_next", **{**SIZES, **LINEAR, "linear_key_head_dim": 64}),
        "hunyuan_v1_moe": tiny("hunyuan_v1_moe", **SIZES, num_experts=8, moe_topk=2),
        "minimax_m2": tiny("minimax_m2", **{**SIZES, **HEADS_OF_M2}, num_local_experts=8, num_experts_per_tok=2),
        "olmoe": tiny(
            "olmoe", **{**SIZES, "hidden_size": 512, "intermediate_size": 128}, num_experts=8, num_experts_per_tok=2
        ),
        "hy_v3": tiny(
            "hy_v3",
            **{**SIZES, **EXPERTS},
            num_experts=8,
            num_shared_experts=1,
            mlp_layer_types=["dense", *["sparse"] * 3],
        ),
        "exaone_moe": tiny(
            "exaone_moe",
            **{**SIZES, **EXPERTS},
            num_experts=8,
            num_shared_experts=1,
            sliding_window=8,
            first_k_dense_replace=1,
        ),
        "ernie4_5_moe": tiny(
            "ernie4_5_moe",
            **SIZES,
            moe_intermediate_size=128,
            moe_num_experts=8,
            moe_k=2,
            moe_num_shared_experts=2,
            moe_layer_start_index=1,
            moe_layer_end_index=3,
            moe_layer_interval=1,
        ),
        "deepseek_v3": tiny("deepseek_v3", **ABSORBED, rope_parameters=LATENT_YARN),
        "deepseek_v2": tiny(
            "deepseek_v2",
            **{**ABSORBED, "q_lora_rank": None},
            topk_method="greedy",
            norm_topk_prob=False,
            rope_parameters=LATENT_YARN,
        ),
        "glm4_moe_lite": tiny("glm4_moe_lite", **ABSORBED, rope_parameters=LATENT_YARN),
        **{name: tiny(name.removesuffix("-dense"), **fields) for name, fields in NEWER.items()},
        "kimi_k2": twins.read("kimi_k2", tiny("deepseek_v3", **ABSORBED, rope_parameters=LATENT_YARN).to_dict()),
    }


def newer_configs(names: Iterable[str]) -> dict[str, Any]:
    """HF configs of newer families, with most sizes of the zoo."""
    cases = {case.model_type: case for case in reversed(zoo.cases().values())}
    sizes = {**WIDE, "max_position_embeddings": 128}
    return {name: tiny(name, **{**cases[name].fields, **sizes, **MIXED.get(name, {})}) for name in names}


UNLOADABLE = ("gpt_oss", "olmo3")
"""vLLM 0.24 raises KeyError 'layers.0.mlp.experts.w13_weight' of weights in bf16, 'rope_theta' since transformers 5."""
NOT_ON_CPU = {
    "nemotron_h": "vLLM's CPUs have no experts without a gate",
    "gpt_oss": "vLLM 0.24 does not load it unquantized, and 0.32 no second time",
    "minimax_m2": "vLLM's CPUs select experts by softmax, or in groups",
    "olmo3": "vLLM 0.24 looks for rope_theta where transformers 5 has none, and 0.32 for do_not_compile",
    "qwen3_next": "vLLM's CPUs compute gated delta nets in bf16 alone",
}
UNTIED_ON_CPU = ("arcee", "gemma3_text", "llama")
"""vLLM packs the output layer there, and does not pack it again when the embedding that it shares is loaded again."""
UNBIASED_ON_CPU = ("ernie4_5_moe",)
"""vLLM's softmax over experts passes over their biases there."""
HELD_ON_CPU = (
    *("afmoe", "apertus", "cohere2", "flex_olmo", "gemma4_text", "glm", "gpt_neox", "granite"),
    *("granitemoe", "granitemoeshared", "laguna", "lfm2_moe", "olmo", "phi", "stablelm"),
)
"""Newer families. vLLM takes their weights on a CPU, but lacks kernels there to compute with some of them."""
ON_GPUS = ("apertus", "cohere", "cwm", "falcon_h1", "gemma4_text", "glm", "gpt_neox", "granite", "jais2", "stablelm")
"""Newer families with which vLLM 0.24 computes on GPUs."""
AFTER = (
    *("bailing_hybrid", "deepseek_ref", "deepseek_v4", "gemma4_unified_text", "granitemoehybrid", "hy_v4"),
    *("inkling_text", "internlm3", "iquestcoder", "kimi_linear", "lfm3", "ministral", "minimax_m3"),
    *("minimax_m3_vl_text", "mistral4", "nanochat", "qwen4_exp_text", "solar_open", "step3p5"),
    *("vaultgemma", "youtu"),
)
LEFT_OUT = {
    **dict.fromkeys(AFTER, "no engine on a GPU was tried with it"),
    **dict.fromkeys(
        ("axk1", "laguna", "lfm2", "mellum", "mimo_v2_flash"), "vLLM 0.24 cannot read a config of transformers 5"
    ),
    **dict.fromkeys(("cohere2", "cohere2_moe"), "vLLM 0.24 has no biases of attention, which its small config has"),
    **dict.fromkeys(("olmo", "phi"), "vLLM 0.24 has no groups of queries there, which its small config has"),
    **dict.fromkeys(("afmoe", "flex_olmo", "lfm2_moe"), "vLLM 0.24 has other log-probs, with experts 128 wide, too"),
    **dict.fromkeys(("granitemoe", "olmo_hybrid"), "vLLM 0.24 gives NaN, with experts or heads 128 wide, too"),
    "granitemoeshared": "vLLM 0.24 does not find a name of its own experts",
    **dict.fromkeys(("Glm4vMoe_text", *COMPOSITES), "vLLM has it with images alone"),
    "bailing_moe": "it is bailing_moe_v2, as the first files spell it",
    "deepseek_v32": "megatron-core has it from 0.19 on, and GPUs had 0.16.1",
    "dots1": "vLLM dropped it in 0.23",
    "glm_moe_dsa": "megatron-core has it from 0.19 on, and GPUs had 0.16.1",
    "helium": "vLLM has none",
    "qwen3_5_moe_text": "vLLM has it with images alone",
    "qwen3_5_text": "vLLM has it with images alone",
}
"""Families that no engine is fed with, and why."""
NO_AUX = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
ENGINE_FIELDS: dict[str, dict[str, Any]] = {
    "ministral3": {
        "llama_4_scaling": {"original_max_position_embeddings": 16, "beta": 0.4},
        "rope_parameters": {**MINISTRAL_ROPE, "apply_yarn_scaling": False},
    },
    "deepseek_v3": NO_AUX,
    "afmoe": {
        "score_func": "sigmoid",
        "route_norm": True,
        "route_scale": 1.5,
        "n_group": 1,
        "topk_group": 1,
        "mup_enabled": True,
    },
    "kimi_k2": {**NO_AUX, "architectures": ["DeepseekV3ForCausalLM"]},
    "mimo": {"architectures": ["MiMoForCausalLM"]},
    "bailing_moe_v2": {"architectures": ["BailingMoeV2ForCausalLM"]},
    "hunyuan_v1_dense": {"use_qk_norm": True},
    "hunyuan_v1_moe": {
        "use_qk_norm": True,
        "use_mixed_mlp_moe": True,
        "num_shared_expert": 1,
        "moe_intermediate_size": SIZES["intermediate_size"],
    },
    "exaone_moe": {"architectures": ["ExaoneMoEForCausalLM"], "is_moe_layer": [False, True, True, True]},
    "minimax_m2": {
        "rotary_dim": HEADS_OF_M2["head_dim"],
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "num_mtp_modules": 0,
    },
    "hy_v3": {
        "expert_hidden_dim": EXPERTS["moe_intermediate_size"],
        "first_k_dense_replace": 1,
        "route_norm": True,
        "qk_norm": True,
        "num_nextn_predict_layers": 0,
    },
}
