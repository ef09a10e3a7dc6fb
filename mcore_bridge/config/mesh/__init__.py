"""The mesh: its sizes, the split of the pipeline, and its process groups. It may import ``config`` and
``config/tables``.
"""
