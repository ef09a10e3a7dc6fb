"""Submodules of layer specs, and functions that put them into specs. They may import ``config`` and ``rules``."""
