"""Conversions of folders of weights to other formats, as a library. Imports ``launch``, ``factory`` and ``weights``."""
