"""Folders of weights to folders of another format: a library. It imports ``launch``, ``factory`` and ``weights``."""
