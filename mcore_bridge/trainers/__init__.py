"""Thin faces over the surface, in the words of trainers. Nothing of a trainer is imported."""
