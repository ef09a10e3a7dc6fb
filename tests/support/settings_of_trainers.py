"""Settings of verl and siiRL, and their effects."""

import re
from pathlib import Path

from mcore_bridge import ParallelDims

PAGE = (Path(__file__).parent.parent.parent / "docs" / "trainers" / "verl.md").read_text()


ROWS = dict(re.findall(r"^\| (`.+?) \| (\w+).*\|$", PAGE.partition("## Settings")[2].partition("## ")[0], re.MULTILINE))


BECOMES = {key: word for cell, word in ROWS.items() for key in re.findall(r"`(\w+)`", cell)}


ENGINE = {
    key
    for cell in re.findall(r"^\| (`.+?) \|", PAGE.partition("## The engine")[2].partition("## ")[0], re.MULTILINE)
    for key in re.findall(r"`(\w+)`", cell)
}
"""The keys of ``megatron:`` in docs/trainers/verl.md."""


SIIRL = {
    *(ParallelDims().to_group_sizes().keys() - {"hierarchical_context_parallel_sizes"}),
    *("sequence_parallel", "use_distributed_optimizer", "param_dtype", "seed"),
    *("param_offload", "grad_offload", "optimizer_offload", "extra", "override_transformer_config"),
    *("use_dist_checkpointing", "dist_checkpointing_path", "override_ddp_config", "use_mbridge"),
}
"""The keys in siiRL's ``megatron:``."""
