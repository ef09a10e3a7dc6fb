"""How much memory an export may take beside the model."""

MESSAGES_IN_FLIGHT = 2
"""Messages that are on their way at once, each in memory of its own."""
MEMORY = 2_000_000_000
"""Bytes that an export takes beside the model, where nothing else is asked for and no HF tensor is too large."""
SLAB = 32 << 20
"""Bytes up to which HF tensors of one shape that come with one message share an allocation."""
