"""``mcore-bridge plan``: a mesh that nobody started, its memory and its export. It imports ``launch``."""
