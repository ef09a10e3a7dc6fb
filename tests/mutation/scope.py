"""What is mutated, and what is not: everything that names files of the project is in this module."""

CODE = tuple(
    """
    weights/layout*.py weights/trace.py weights/mapping.py weights/names.py weights/layer_stack.py
    weights/entries.py weights/cut.py weights/plan.py weights/planning.py weights/lanes.py weights/turns.py
    weights/sizes.py weights/footprint.py weights/program.py weights/exchange.py weights/moves.py
    weights/rectangles.py weights/outputs.py weights/lineup.py weights/slices.py weights/target.py
    weights/load.py weights/save.py weights/shards.py weights/staging.py weights/reading.py weights/disk.py
    weights/safetensors_file.py weights/checkpoint.py weights/swap.py
    config/fields.py config/tables*.py config/derived*.py config/moe*.py config/hf.py config/transformer.py
    config/*rope*.py config/spelling.py config/checks.py
    batches/*.py
""".split()
)
"""Files of ``mcore_bridge`` from which mutants are drawn."""

TESTS_LEFT_OUT = tuple(
    """
    test_gpu* test_mutants* test_examples* test_benchmarks* test_cli* test_import* test_second* test_rlinf*
    test_verl* test_vllm* test_sglang* test_slime* test_siirl* test_nemo* test_megatron_lm* test_hash_seeds*
""".split()
)
"""Test files that are not used: they need GPUs or other packages, run the code in processes of which no trace is kept,
or test trainers."""

VARIANTS = 6
"""Of a test that has more sets of parameters, so many are used: all would take as long as the suite for each survivor."""

OF_TABLES = {
    "*/config/*": ("test_config*", "test_refused*", "test_rope*", "test_families*", "test_parity*"),
    "*": ("test_layout*", "test_mapping*", "test_roundtrip*", "test_targets*"),
}
"""Which tests reach what runs at import, in files that have no function: the first pattern that fits counts."""
