"""Submodules of layer specs, and functions that put them there. They may import ``config`` and ``rules``."""
