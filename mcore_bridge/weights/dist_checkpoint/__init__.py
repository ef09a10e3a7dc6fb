"""Checkpoints in megatron-core's format. It imports ``files``, ``transfer`` and the files of ``weights``."""
