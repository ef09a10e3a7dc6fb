"""The mesh: its sizes, where the pipeline cuts, and its process groups. It imports ``config``."""
