"""Mutation testing: small mistakes are drawn at random from the code, and the tests that reach each one must find it.

``python -m tests.mutation`` runs it, and ``__main__.py`` describes it.
"""
