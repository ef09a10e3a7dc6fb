"""``mcore-bridge verify``: loads and exports a checkpoint on real ranks, and compares. It may import ``launch``."""
