"""Times ``mcore-bridge plan``, imports included, and shows its figures: ``python benchmarks/plan.py``.

Each plan runs in a separate process, whose seconds of CPU (user and system) are counted. No GPU is needed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DEEPSEEK = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
KIMI = DEEPSEEK | {
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "max_position_embeddings": 131072,
    "rope_theta": 50000.0,
}
QWEN = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""The sizes of published configs, without fields that change no weight."""
CASES = (
    ("DeepSeek-V3", DEEPSEEK, "--tp 1 --pp 8 --ep 8 --world 64"),
    ("DeepSeek-V3", DEEPSEEK, "--tp 1 --pp 16 --ep 64 --world 1024"),
    ("DeepSeek-V3", DEEPSEEK, "--tp 1 --pp 16 --ep 256 --world 4096"),
    ("Kimi-K2", KIMI, "--tp 8 --sp --pp 8 --ep 8 --world 64"),
    ("Kimi-K2", KIMI, "--tp 1 --pp 16 --ep 64 --world 1024"),
    ("Kimi-K2", KIMI, "--tp 8 --sp --pp 16 --ep 128 --world 4096"),
    ("Qwen3-235B", QWEN, "--tp 4 --sp --pp 8 --ep 8 --world 64"),
    ("Qwen3-235B", QWEN, "--tp 4 --sp --pp 16 --vp 2 --ep 8 --world 1024"),
    ("Qwen3-235B", QWEN, "--tp 4 --sp --pp 16 --ep 128 --world 4096"),
    ("Qwen3-235B", QWEN, "--tp 4 --sp --pp 8 --ep 8 --world 64 --engine-tp 8"),
    ("Qwen3-235B", QWEN, "--tp 4 --sp --pp 8 --ep 8 --world 64 --engine-tp 8 --engine-ep 8"),
    ("DeepSeek-V3", DEEPSEEK, "--tp 1 --pp 16 --ep 64 --world 1024 --engine-tp 16 --engine-ep 16"),
)


def main() -> None:
    """Print a row for each case, and below it the lines of ``plan`` about an export, and about engines if there are
    any.
    """
    print("| model | mesh | CPU s | wall s | peak GiB |\n|---|---|---|---|---|", flush=True)
    said = []
    for name, config, mesh in CASES:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(config))
            seconds, wall, peak, output = _run([folder, *mesh.split(), "--layout", "balanced"])
        print(f"| {name} | `{mesh}` | {seconds:.1f} | {wall:.1f} | {peak:.2f} |", flush=True)
        said.append(f"- {name}, `{mesh}`: {' '.join(output[output.index('An export yields') :].split())}")
    print("\n" + "\n".join(said))


def _run(arguments: list[str]) -> tuple[float, float, float, str]:
    """Seconds of CPU and of the clock, GiB and output of one plan."""
    command = [sys.executable, "-m", "mcore_bridge.cli", "plan", *arguments]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed")
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - start, usage.ru_maxrss / 2**20, output


if __name__ == "__main__":
    main()
