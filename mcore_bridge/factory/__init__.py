"""Builds ``GPTModel``s from an HF config: a blueprint decides and checks, then chunks are built. It
may import ``architecture``, ``config`` and ``weights``."""
