"""Multi-latent attention: DeepSeek and those built like it; with and without low-rank queries, yarn, experts."""

from tests.zoo import Case, case, rope

DIMS = {
    "num_key_value_heads": 8,
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 10,
    "rms_norm_eps": 1e-3,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0, "beta_slow": 1.0}
DENSE = {"first_k_dense_replace": 4}


def latent(model_type: str, **fields: object) -> Case:
    """A case whose dims are pairwise distinct, with an epsilon that latents must not take."""
    return case(model_type, **{**DIMS, **fields})


CASES = {
    "deepseek_v3-dense": latent("deepseek_v3", **DENSE, vocab_size=97),
    "deepseek_v3-whole-queries": latent("deepseek_v3", **DENSE, q_lora_rank=None),
    "deepseek_v3-yarn": latent("deepseek_v3", **DENSE, **rope("yarn", **YARN, mscale=1.3, mscale_all_dim=0.7)),
}
