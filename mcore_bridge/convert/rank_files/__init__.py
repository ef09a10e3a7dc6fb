"""Megatron's ``torch`` format: one file for each place on a mesh. Imports ``factory``, ``weights``, ``parameters``."""
