"""The config table of residuals of several streams (hyper-connections), by the field names of megatron-core 0.20."""

from mcore_bridge.config.fields import Const, Field, Map

STREAMS: tuple[Field, ...] = (
    Const("enable_mhc_connections", True),
    Map("hc_mult", "mhc_num_residual_streams"),
    Map("hc_eps", "mhc_epsilon"),
    Const("variable_seq_lengths", True),  # otherwise stages expect hidden states of the width of one stream
)
UNMIXED: tuple[Field, ...] = (
    *STREAMS,
    Const("mhc_sinkhorn_iterations", 0),
    Map("hc_magnitude", "mhc_magnitude"),
)
"""Streams that are not mixed with each other."""
