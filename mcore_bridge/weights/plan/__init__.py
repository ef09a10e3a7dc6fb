"""What travels when: data, the same on every rank. It imports ``errors`` and ``rules``, and no process."""
