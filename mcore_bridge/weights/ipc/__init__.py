"""A ring of buffers from which the process of an engine reads HF tensors. It needs only torch."""
