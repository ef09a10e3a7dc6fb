"""Load, save and export weights: one file for each. They import ``architecture``, ``config`` and ``rules``."""
