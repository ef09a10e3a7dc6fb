"""HF weights from anywhere, opened once: plain names and values, however a folder, a mapping or pairs store them."""
