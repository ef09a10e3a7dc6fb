"""Mixers in the place of attention: Mamba-2, linear attention by delta rules, and short convolutions."""
