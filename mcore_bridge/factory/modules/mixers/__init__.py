"""Mixers in the place of attention: Mamba-2, linear attention by the delta rule, and short convolutions."""
