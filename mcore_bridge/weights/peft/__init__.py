"""Folders of adapters as peft writes them: their config, their tensors, and their names."""
