"""Layouts, canonical names and weight rules, as data. This package imports only ``errors``."""
