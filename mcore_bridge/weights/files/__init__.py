"""File formats, and the disk. It imports ``errors``, ``rules`` and ``transfer/failures``."""
