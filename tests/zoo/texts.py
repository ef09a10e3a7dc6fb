"""The text models of composites of images and text: their ropes share dims among three positions, all equal here."""

import tests.support.text_halves  # noqa: F401  (which lets transformers find them)
from tests.zoo import NEWEST, Case, case, rope
from tests.zoo.dense import WINDOWED, YARN
from tests.zoo.moe import EXPERTS, SIGMOID
from tests.zoo.norms import HUNYUAN

SECTIONS = {"mrope_section": [4, 4, 4]}  # of the 24 dims of a head, or 12 that are rotated
SPREAD = {**SECTIONS, "mrope_interleaved": True}
HALF = {"mrope_section": [2, 2, 2], "partial_rotary_factor": 0.5}
XDROPE = {**HUNYUAN, "mrope_section": [3, 3, 3, 3]}


GLIMMER = {**WINDOWED, "post_norm_eps": 1e-3, "final_logit_softcapping": 2.0, "pad_token_id": 95}


def half(**fields: object) -> dict[str, object]:
    """The rope of GLM, half of each head; 4.57 has the factor at the top."""
    if NEWEST:
        return {**rope("default", **HALF), **fields}
    return {**rope("default", mrope_section=HALF["mrope_section"]), "partial_rotary_factor": 0.5, **fields}


CASES: dict[str, Case] = {
    "qwen2_vl": case("qwen2_vl_text", hidden_size=192, **WINDOWED, **rope("default", **SECTIONS)),
    "qwen2_5_vl": case(
        "qwen2_5_vl_text", hidden_size=192, tie_word_embeddings=True, **WINDOWED, **rope("yarn", **YARN, **SECTIONS)
    ),
    "qwen3_vl": case("qwen3_vl_text", attention_bias=True, **rope("default", **SPREAD)),
    "qwen3_vl_moe": case(
        "qwen3_vl_moe_text",
        **EXPERTS,
        num_experts=4,
        mlp_only_layers=[1],
        vocab_size=97,
        **rope("yarn", **YARN, **SPREAD),
    ),
    "qwen2_5_omni": case("qwen2_5_omni_text", hidden_size=192, **WINDOWED, **rope("default", **SECTIONS)),
    "qwen3_omni_moe": case(
        "qwen3_omni_moe_text",
        **EXPERTS,
        num_experts=4,
        mlp_only_layers=[1],
        norm_topk_prob=False,
        attention_bias=True,
        vocab_size=97,
        **rope("default", **SPREAD, interleaved=True),
    ),
    "glm4v": case("glm4v_text", **half(hidden_size=192, vocab_size=97)),
    "hunyuan_vl": case("hunyuan_vl_text", attention_bias=True, rope_scaling=XDROPE),
    "muse_glimmer": case("muse_glimmer_text", **GLIMMER, attention_bias=True, vocab_size=97, **rope("default")),
    "muse_glimmer-windows-and-nope-apart": case(
        "muse_glimmer_text",
        **{**GLIMMER, "layer_rope_theta": [0, 5e5, 5e5, 0], "rms_norm_eps": 1e-2},
        **rope("default", theta=5e5),
    ),
    "glm4v_moe": case("glm4v_moe_text", **half(**SIGMOID, n_group=1, topk_group=1, attention_bias=True)),
}
