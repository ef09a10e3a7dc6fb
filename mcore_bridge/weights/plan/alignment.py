"""Where tensors begin that lie behind one another in memory: in windows and buffers."""

ALIGNMENT = 256
"""Bytes: a multiple of every itemsize, so that tensors can be viewed in place, and of what a GPU reads at once."""


def aligned(num_bytes: int) -> int:
    """The first place behind ``num_bytes`` at which a tensor may begin."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
