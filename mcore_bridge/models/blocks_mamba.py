"""Shared tables of Mamba-2 mixers, which stand in the place of attention."""

from mcore_bridge.rules.layout import COLUMN, ROW
from mcore_bridge.rules.mapping import table
from mcore_bridge.rules.mixer_layouts import MAMBA_CONV, MAMBA_IN

# fmt: off
MAMBA = table(("in_proj.weight",  "in_proj.weight",  MAMBA_IN),
              ("conv1d.weight",   "conv1d.weight",   MAMBA_CONV),
              ("conv1d.bias",     "conv1d.bias",     MAMBA_CONV),
              ("A_log",           "A_log",           COLUMN),
              ("D",               "D",               COLUMN),
              ("dt_bias",         "dt_bias",         COLUMN),
              ("norm.weight",     "norm.weight",     COLUMN),
              ("out_proj.weight", "out_proj.weight", ROW))
# fmt: on
"""The rules of a mixer, without the names of its places."""
