"""Architectures, one small file each: a config table, and rules for the weights put together from ``blocks.py``."""
