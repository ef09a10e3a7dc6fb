"""Architectures, one small file each, the registry that holds them, and the factory of models."""
