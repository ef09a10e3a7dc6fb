"""Build chunks that are a ``HybridModel`` of megatron-core, whose layers are halves of a ``GPTModel``'s."""
