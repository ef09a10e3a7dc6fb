"""Families that differ from known families only in tables: one case each, with its special options switched on."""

from tests.zoo import case, rope
from tests.zoo.dense import LLAMA3
from tests.zoo.latent import DENSE, DIMS, latent
from tests.zoo.moe import EXPERTS, SIGMOID
from tests.zoo.norms import WINDOWED, ropes
from tests.zoo.plain import TEMPERED, YARN

BIASED = {"attention_bias": True, "mlp_bias": True}
OF_HEADS = ("num_key_value_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
OF_HEADS += ("head_dim", "v_head_dim", "rms_norm_eps")
YOUTU = {name: size for name, size in DIMS.items() if name in OF_HEADS}
CASES = {
    "internlm3": case("internlm3", **BIASED, vocab_size=97, **rope("dynamic", factor=4.0)),
    "iquestcoder": case("iquestcoder", attention_bias=True, tie_word_embeddings=True),
    "cwm": case("cwm", **WINDOWED, vocab_size=97, **rope("llama3", **LLAMA3)),
    "ministral": case("ministral", **WINDOWED),
    "solar_open": case("solar_open", **SIGMOID, attention_bias=True, routed_scaling_factor=2.5),
    "youtu": case("youtu", **YOUTU, tie_word_embeddings=True, vocab_size=97),
    "jais2": case("jais2", vocab_size=97, layer_norm_eps=1e-4),
    "mellum": case(
        "mellum",
        **{**EXPERTS, **WINDOWED, **ropes({"rope_type": "linear", "factor": 4.0})},
        num_experts=4,
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        norm_topk_prob=False,
    ),
    "glm": case("glm", pad_token_id=0, vocab_size=97, rms_norm_eps=1e-3),
    "mistral4": latent(
        "mistral4", **{**DENSE, "first_k_dense_replace": 1, "head_dim": 20}, **rope("yarn", **YARN, **TEMPERED)
    ),
}
