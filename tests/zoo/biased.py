"""Experts chosen by softmax scores and a bias: in all layers or some, beside shared ones or alone."""

from tests.zoo import case, rope
from tests.zoo.dense import YARN

EXPERTS = {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32}
CASES = {
    "ernie4_5_moe": case("ernie4_5_moe", **EXPERTS, vocab_size=97, moe_num_shared_experts=2, moe_norm_min=0.2),
    "ernie4_5_moe-alone-tied": case(
        "ernie4_5_moe",
        **EXPERTS,
        moe_num_shared_experts=0,
        moe_layer_start_index=0,
        moe_layer_end_index=2,
        tie_word_embeddings=True,
        **rope("yarn", **YARN),
    ),
    "ernie4_5_moe-every-other": case(
        "ernie4_5_moe", **{**EXPERTS, "moe_k": 1}, moe_layer_start_index=0, moe_layer_interval=2
    ),
}
