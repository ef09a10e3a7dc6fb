"""The verbs for weights, one file each: load, save, export. They import ``architecture``, ``config`` and ``rules``."""
