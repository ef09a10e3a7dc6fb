"""SGLang in FP8 follows a trainer on a GPU: equal weights in every bit, and log-probs as near as FP8 allows."""

import importlib.util

import pytest

from tests.support.quantized_rollouts import EXPERTS, FP8, follow
from tests.workers.sglang_sync import serve_on_gpu

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]
ROLLOUTS = {
    "fp8-dense": ("qwen3", {}, FP8, "shards", 3),
    "fp8-experts": ("qwen3_moe", EXPERTS, FP8, "shards", 3),
}
"""See ``follow``. SGLang also rounds activations in FP8."""


@pytest.mark.parametrize("case", ROLLOUTS)
def test_rollouts_in_fp8_follow_the_trainer_for_five_steps(case, tmp_path):
    """After each step SGLang is as near to the trainer as FP8 allows. Without a step it would be further away."""
    follow(ROLLOUTS[case], tmp_path, serve_on_gpu)
