"""Tensors handed to the process of an engine, and copied into its own. All of it needs torch and numpy alone."""
