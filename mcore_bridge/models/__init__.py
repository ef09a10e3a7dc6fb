"""Architectures, one small file each: a config table, and weight rules from ``blocks.py``. They may import
``architecture``, ``config``, ``errors`` and ``rules``."""
