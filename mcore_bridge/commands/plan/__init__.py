"""``mcore-bridge plan``: memory and exports of a mesh that is not started. It may import ``launch``."""
