"""Reads and writes the file formats of weights. It imports ``errors``, ``rules`` and ``transfer/failures``."""
