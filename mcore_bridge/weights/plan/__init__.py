"""Plans of exports: which bytes travel when, as data, equal on every rank. It imports ``errors`` and ``rules``."""
