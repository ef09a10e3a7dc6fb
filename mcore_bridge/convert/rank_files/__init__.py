"""Megatron's ``torch`` format, a file for each place on a mesh. Imports ``factory``, ``weights``, ``parameters``."""
