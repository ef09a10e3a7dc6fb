"""Attention to the tokens that an indexer selects: fewer than a sequence has, latent or in blocks, shared or not."""

from tests.zoo import Case, case, rope
from tests.zoo.latent import GROUPED, YARN, latent

# So many heads that no two scores are zero at once: which one is selected would depend on the shape of a batch.
INDEXER = {"index_n_heads": 12, "index_head_dim": 16, "index_topk": 7, "first_k_dense_replace": 1}


def sparse(model_type: str, **fields: object) -> Case:
    """A case in which queries attend to only a part of the earlier tokens, at the lengths of the zoo."""
    return latent(model_type, **{**INDEXER, **fields})


BLOCKS = {
    "index_n_heads": 2,
    "index_head_dim": 20,
    "index_block_size": 3,
    "index_topk_blocks": 2,
    "intermediate_size": 40,
    "dense_intermediate_size": 88,
    "shared_intermediate_size": 56,
    "swiglu_limit": 0.5,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **rope("default", partial_rotary_factor=0.5),
}
FULL, BLOCK = "full_attention", "minimax_m3_sparse"
CASES = {
    "minimax_m3_vl_text": case(
        "minimax_m3_vl_text",
        **{**BLOCKS, "layer_types": [FULL, BLOCK, BLOCK, FULL], "vocab_size": 97},
        mlp_layer_types=["dense", "sparse", "sparse", "dense"],
    ),
    "minimax_m3_vl_text-heads": case(
        "minimax_m3_vl_text",
        **{**BLOCKS, "layer_types": [BLOCK] * 4, "index_n_heads": 4, "index_block_size": 2, "index_topk_blocks": 3},
        index_local_blocks=2,
    ),
    "deepseek_v32": sparse("deepseek_v32", **GROUPED, vocab_size=97),
    "deepseek_v32-yarn": sparse(
        "deepseek_v32",
        **rope("yarn", **YARN, mscale=1.3, mscale_all_dim=0.7),
        first_k_dense_replace=4,
        n_group=1,
        topk_group=1,
    ),
    "glm_moe_dsa": sparse("glm_moe_dsa", **GROUPED, tie_word_embeddings=True),
    "glm_moe_dsa-shared": sparse(
        "glm_moe_dsa", n_group=1, topk_group=1, index_topk_freq=2, index_skip_topk_offset=1, rms_norm_eps=1e-5
    ),
}
