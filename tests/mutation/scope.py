"""The files that are mutated, and the names of all files of the project that mutation testing uses."""

CODE = (
    *("rules/*.py", "batches/*.py", "weights/*.py", "config/*.py", "factory/*.py", "launch/*.py", "convert/**/*.py"),
    *(
        f"weights/{folder}/*.py"
        for folder in ("plan", "transfer", "files", "dist_checkpoint", "ipc", "engine", "peft", "source")
    ),
    *("factory/modules/**/*.py", "factory/vision/*.py"),
    *("config/tables/*.py", "config/mesh/*.py", "architecture.py", "composite.py"),
    *(f"models/{family}.py" for family in ("cohere2_moe", "ernie4_5_moe", "llama4_text", "nemotron_h")),
)
"""Files of ``mcore_bridge`` from which mutants are drawn."""

TESTS_LEFT_OUT = (
    *("test_gpu*", "test_mutants*", "test_examples*", "test_benchmarks*", "test_cli*", "test_import*", "test_second*"),
    *("test_rlinf*", "test_verl*", "test_vllm*", "test_sglang*", "test_slime*", "test_siirl*", "test_nemo*"),
    *("test_megatron_lm*", "test_hash_seeds*"),
)
"""Test files that are not used: they need GPUs or other packages, run the code in processes that are not traced, or
test trainers.
"""

_FAMILIES = ("test_docs*tables*", "test_refused*", "test_config_norms*", "test_families*", "test_parity*")
OF_TABLES = {
    "*/config/*": _FAMILIES,
    "*/models/*": _FAMILIES,
    "*/rules/*layout*": ("test_layout*", "test_mapping*", "test_roundtrip*", "test_parity*"),
}
"""Tests that come first for code of tables that runs at import."""
