"""Ranks without torchrun: processes, and one process as any rank of a mesh. It imports ``config``."""
