"""Jobs of ``tests/weights/test_encoding.py``."""
