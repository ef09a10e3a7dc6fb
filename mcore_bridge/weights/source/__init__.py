"""Sources of HF weights: a folder, a mapping or pairs, opened once, with plain names and decoded values."""
