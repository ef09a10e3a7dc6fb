"""A Mamba-2 mixer: the module, how it computes, and its tensors in checkpoints of megatron-core."""
