"""A ring of buffers from which the process of an engine reads HF tensors. All of it needs torch alone."""
