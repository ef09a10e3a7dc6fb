"""Runs of RLinf's own code."""

import importlib
import importlib.util

_NEEDED = ("rlinf", "ray", "omegaconf", "megatron.training")


def _missing() -> list[str]:
    def is_there(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            return False

    return [name for name in _NEEDED if not is_there(name)]


TIMEOUT = 500.0  # RLinf takes long to import
