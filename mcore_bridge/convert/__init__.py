"""Conversion of folders of weights to another format, as a library. It imports ``launch``, ``factory``, ``weights``."""
