"""Residual streams, with latent attention to selected keys, which layers share or not, or beside linear attention."""

from tests.zoo import Case, case, rope
from tests.zoo.delta import EXPERTS, LINEAR
from tests.zoo.sparse import sparse

TOKENS = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
HY = {**TOKENS, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 3, "swiglu_limit": 0.5, "hc_magnitude": 1.5}
HY |= {"hc_eps": 0.01, "n_shared_experts": 1}
DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse", "sparse", "dense"], "first_k_dense_replace": None}

GLM = {
    **TOKENS,
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "linear_num_heads": 4,
    "linear_head_dim": 12,
    **DENSE_FIRST,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "swiglu_limit": 0.5,
    "vocab_size": 97,
    "qk_rope_head_dim": 0,
    "head_dim": 0,
    "index_kpool": 3,
    "index_topk": 9,
    "hc_sinkhorn_iters": 2,
    "hc_eps": 0.1,
}
"""A balanced mix keeps the mean of streams: after more iterations, some gradients would be rounding errors alone."""

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
DEEPSEEK = {
    **TOKENS,
    "vocab_size": 97,
    "head_dim": 24,
    "qk_rope_head_dim": 8,
    "num_key_value_heads": 1,
    "q_lora_rank": 28,
    "o_groups": 4,
    "o_lora_rank": 10,
    "intermediate_size": 36,
    "sliding_window": 5,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "num_hash_layers": 1,
    "swiglu_limit": 0.5,
    "index_n_heads": 12,
    "index_head_dim": 16,
    "index_topk": 2,
    "rope_scaling": YARN,
    "layer_types": ["sliding_attention", *["compressed_sparse_attention", "heavily_compressed_attention"] * 2][:4],
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 3},
    "hc_sinkhorn_iters": 2,
    "hc_eps": 0.1,
}
"""Half of the layers compress the keys of a window, of which one selects them. A token chooses experts of the first."""


QWEN = {
    **TOKENS,
    **LINEAR,
    **EXPERTS,
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "rms_norm_eps": 1e-3,
    "hc_count": 3,
    "hc_lowrank": 10,
    **rope("default", partial_rotary_factor=0.5, mrope_section=[2, 2, 2], mrope_interleaved=True),
    "indexer_n_heads": 12,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_compress_ratio": 3,
    "indexer_budget": 6,
}


NGRAMS = {
    "layer_types": ["linear_attention", "linear_attention", "indexed_attention", "indexed_attention"],
    "ple_layer_ids": [1, 2],
    "ple_embed_dim": 24,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 20,
    "make_ngram_vocab_size_divisible_by": 4,
    "split_ngram_parts": 3,
}


def hunyuan(*kinds: str, **fields: object) -> Case:
    """A case with these ``indexer_types``."""
    return sparse("hy_v4", **{**HY, **DENSE_FIRST, "indexer_types": [*kinds], **fields})


CASES = {
    "hy_v4": hunyuan("full", "shared", "full", "shared", vocab_size=97),
    "glm5_next_text": sparse("glm5_next_text", **GLM),
    "deepseek_v4": case("deepseek_v4", **DEEPSEEK),
    "qwen4_exp_text-no-ngrams": case("qwen4_exp_text", **QWEN, vocab_size=97, output_gate_type="sigmoid"),
    "qwen4_exp_text": case("qwen4_exp_text", **{**QWEN, **NGRAMS}),
    "hy_v4-indexers": hunyuan(*["full"] * 4, hc_mult=3),
}
