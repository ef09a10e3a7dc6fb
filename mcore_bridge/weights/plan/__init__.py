"""Plans of exports: what travels when, as data that is the same on every rank. It imports ``errors`` and ``rules``."""
