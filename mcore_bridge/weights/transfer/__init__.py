"""Runs plans, with collectives and copies of bytes. It imports ``plan`` and ``rules``."""
