"""Planted mistakes: each is one slip in a table, a name or a module. ``test_mutants.py`` runs them.

Each file has some of three tables. A model is a case of the zoo by its name, or a config.

- ``RULES``: what shows the mistake (``at tp=2``: nothing does on one rank), the model, how it changes the rules.
- ``MODULES``: the model, the mesh, and a context in which modules or config tables are mistaken, or fields of the
  config instead. The logits show it, and on one rank nothing does if the mesh has more.
- ``GRADIENTS``: the same, where logits show nothing.

A name that begins with ``no mistake`` is of a control, which nothing may show.
"""
