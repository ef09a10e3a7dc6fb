"""Mutation testing: small mistakes are drawn at random from the code, and the tests that reach each one must find it.

``python -m tests.mutation`` runs it; ``__main__.py`` says how.
"""
