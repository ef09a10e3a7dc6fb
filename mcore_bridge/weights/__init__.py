"""The verbs for weights, one file each, over plans and what runs them. It imports ``architecture``, ``config`` and
``rules``."""
