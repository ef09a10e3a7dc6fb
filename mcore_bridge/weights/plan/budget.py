"""Limits on the memory that an export takes beside the model."""

MESSAGES_IN_FLIGHT = 2
"""Messages that travel at once, each in separate memory."""
MEMORY = 2_000_000_000
"""Bytes that an export takes beside the model by default, unless an HF tensor needs more."""
SLAB = 32 << 20
"""Size limit of an allocation that HF tensors of one shape share if they come with one message."""
