"""What runs a plan: collectives, and copies of bytes. It imports ``plan`` and ``rules``."""
