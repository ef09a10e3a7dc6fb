"""Latent attention to the tokens that an indexer selects: fewer than a sequence has, and shared by layers or not."""

from tests.zoo import Case, rope
from tests.zoo.latent import GROUPED, YARN, latent

# So many heads that no two scores are zero at once: which one is selected would depend on the shape of a batch.
INDEXER = {"index_n_heads": 12, "index_head_dim": 16, "index_topk": 7, "first_k_dense_replace": 1}


def sparse(model_type: str, **fields: object) -> Case:
    """A case in which queries attend to only a part of the earlier tokens, at the lengths of the zoo."""
    return latent(model_type, **{**INDEXER, **fields})


CASES = {
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
