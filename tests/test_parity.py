"""The right mapping, not just a bijection: logits equal transformers' in fp32 at tp 1, 2 and above the KV groups.

The bound is 2e-5 of the logits' spread; two exact implementations of these models differ by about 2e-6 in fp32, and the
smallest planted mistake of ``test_mutants.py`` moves them by more than 1e-3.
"""

import pytest
import transformers

import mcore_bridge as mb
from tests import pool
from tests.parity import reference_logits, worst_differences
from tests.strategies import tiny

BOUND = 2e-5
ONE, TWO, FOUR = mb.ParallelDims(), mb.ParallelDims(tp=2, sp=True), mb.ParallelDims(tp=4)
GROUPS = {"num_key_value_heads": 2}


def rope(rope_type, theta=10000.0, **fields):
    """Rope as the installed transformers spells it, so that the reference computes it."""
    spelled = {"rope_type": rope_type, **fields}
    if transformers.__version__.startswith("4."):
        return {"rope_theta": theta, "rope_scaling": spelled if fields else None, "max_position_embeddings": 64}
    return {"rope_parameters": {**spelled, "rope_theta": theta}, "max_position_embeddings": 64}


LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0, "beta_slow": 1.0}
WINDOWED = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2, "layer_types": None}
CASES = {
    "llama": tiny("llama", **GROUPS, vocab_size=97),
    "llama-biases-tied": tiny("llama", **GROUPS, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama-attention-bias": tiny("llama", **GROUPS, attention_bias=True),
    "llama-square": tiny("llama", hidden_size=64, head_dim=8, intermediate_size=64, vocab_size=64, **GROUPS),
    "llama-gelu": tiny("llama", **GROUPS, hidden_act="gelu_pytorch_tanh"),
    "llama-mha-derived-head-dim": tiny("llama", num_key_value_heads=8, head_dim=None),
    "llama-one-group": tiny("llama", num_key_value_heads=1),
    "llama-llama3": tiny("llama", **GROUPS, **rope("llama3", **LLAMA3)),
    "llama-linear": tiny("llama", **GROUPS, **rope("linear", factor=4.0)),
    "llama-dynamic": tiny("llama", **GROUPS, **{**rope("dynamic", factor=4.0), "max_position_embeddings": 16}),
    "llama-yarn": tiny("llama", **GROUPS, **rope("yarn", **YARN)),
    "llama-yarn-attention-factor": tiny("llama", **GROUPS, **rope("yarn", **YARN, attention_factor=1.4)),
    "mistral": tiny("mistral", **GROUPS, sliding_window=None),
    "mistral-window": tiny("mistral", **GROUPS, sliding_window=5),
    "qwen2": tiny("qwen2", **GROUPS, hidden_size=192),
    "qwen2-window": tiny("qwen2", **GROUPS, hidden_size=192, **WINDOWED),
    "qwen3": tiny("qwen3", **GROUPS),
    "qwen3-bias-window": tiny("qwen3", **GROUPS, attention_bias=True, **WINDOWED),
    "qwen3-yarn-tied": tiny("qwen3", **GROUPS, **rope("yarn", **YARN), tie_word_embeddings=True),
}


@pytest.fixture(scope="module")
def references():
    """Longer than every original rope length: positions past it are compared too."""
    return {name: reference_logits(hf, seq=40) for name, hf in CASES.items()}


@pytest.mark.parametrize("dims", [ONE, TWO, FOUR], ids=str)
def test_logits_are_those_of_transformers(references, dims):
    """At tp=4 every case but the multi-head one has fewer KV groups than ranks."""
    cases = [(hf, dims, references[name]) for name, hf in CASES.items()]
    for worst in pool.run(dims.tp, worst_differences, cases):
        assert dict(zip(CASES, worst, strict=True)) == {name: pytest.approx(0, abs=BOUND) for name in CASES}


def test_parity_can_fail(references):
    """Negative controls: another rope base, another epsilon, a window off by one, a window forgotten."""
    wrong = {
        "rope base": (tiny("llama", **GROUPS, vocab_size=97, **rope("default", theta=20000.0)), "llama"),
        "epsilon": (tiny("llama", **GROUPS, vocab_size=97, rms_norm_eps=1e-2), "llama"),
        "window off by one": (tiny("mistral", **GROUPS, sliding_window=6), "mistral-window"),
        "no window": (tiny("mistral", **GROUPS, sliding_window=None), "mistral-window"),
    }
    cases = [(hf, ONE, references[name]) for hf, name in wrong.values()]
    (worst,) = pool.run(1, worst_differences, cases)
    assert all(difference > 50 * BOUND for difference in worst), dict(zip(wrong, worst, strict=True))
