"""Weights: layouts, names, rules and plans describe (pure); load, export and save act; only export communicates."""
