"""Starts ranks without torchrun: as processes, or one process as any rank of a mesh. It imports ``config``."""
