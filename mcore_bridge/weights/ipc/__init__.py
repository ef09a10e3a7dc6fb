"""Tensors handed to the process of an engine; of ``rules`` it imports specs and fused loads, of ``plan`` alignment."""
