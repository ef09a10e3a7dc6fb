"""Interfaces for trainers: those of other bridges, implemented with this library. It imports all but ``commands``."""
