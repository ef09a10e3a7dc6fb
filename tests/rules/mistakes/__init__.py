"""Planted mistakes: each is one slip in a table, a name or a module. ``test_mutants.py`` runs them.

Each file has some of three tables. A model is a case of the zoo by its name, or a config.

- ``RULES``: the check that must find the mistake (``at tp=2``: no check finds it on one rank), the model, and how the
  mistake changes the rules.
- ``MODULES``: the model, the mesh, and a context with wrong modules or config tables, or wrong fields of the config.
  The logits must show it. If the mesh has several ranks, logits on one rank must not.
- ``GRADIENTS``: like ``MODULES``, for mistakes that only gradients show.

An entry whose name begins with ``no mistake`` is a control: no check may find anything.
"""
