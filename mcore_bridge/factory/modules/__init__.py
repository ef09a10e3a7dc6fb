"""Modules for the slots of layer specs, and what puts them there. It imports ``config`` and ``rules``."""
