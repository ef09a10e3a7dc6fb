"""Interfaces for trainers: those of other bridges, on top of ours. It imports all but ``commands``."""
