"""Build ``GPTModel``s from an HF config: a blueprint decides and checks everything, then chunks are built. It may
import ``architecture``, ``config`` and ``weights``.
"""
