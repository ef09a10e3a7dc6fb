"""Interfaces of other bridges for trainers, implemented with this library. It imports all but ``commands``."""
