"""Tensors handed to the process of an engine. It imports ``errors``, ``rules/spec`` and ``plan/alignment``."""
