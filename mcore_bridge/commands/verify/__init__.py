"""``mcore-bridge verify``: a checkpoint there and back on real ranks. It imports ``launch``."""
