"""Alignment of tensors that lie one behind the other in a window or a buffer."""

ALIGNMENT = 256
"""Bytes: a multiple of every itemsize, so that tensors can be viewed in place, and of the widest read of a GPU."""


def aligned(num_bytes: int) -> int:
    """Round ``num_bytes`` up to the next offset at which a tensor may begin."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
