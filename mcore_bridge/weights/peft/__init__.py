"""PEFT folders of adapters: their config, their tensors, and their names."""
