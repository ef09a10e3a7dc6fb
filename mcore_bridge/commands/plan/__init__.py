"""``mcore-bridge plan``: memory and exports of a mesh, without starting it. It may import ``launch``."""
