"""Checkpoints of megatron-core's own format. It imports ``files``, ``transfer`` and the files of ``weights``."""
