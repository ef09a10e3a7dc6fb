"""From an HF config to megatron-core ``GPTModel``s: a blueprint decides and checks, then chunks are built. It
imports ``architecture``, ``config`` and ``weights``."""
