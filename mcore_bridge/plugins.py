"""Architectures of other packages: the entry points of the group ``mcore_bridge.architectures``.

Each loads to an ``Architecture`` or a sequence of them; loading may also make a config class known to transformers.
They are looked up once a ``model_type`` is unknown, and not before.
"""

from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

from mcore_bridge.errors import ConfigError

GROUP = "mcore_bridge.architectures"


def load() -> Iterator[tuple[str, Any]]:
    """Name and value of every entry point. Not cached: a package may be put on ``sys.path`` while we run.

    Raises:
        ConfigError: one does not load; it is named with what it raises.
    """
    for entry_point in entry_points(group=GROUP):
        try:
            value = entry_point.load()
        except Exception as error:  # whatever a broken package of someone else raises
            raise ConfigError(
                f"The entry point {entry_point.value!r} of {GROUP!r} must load, but raises: {error!r}. Update or "
                "uninstall its package."
            ) from error
        yield entry_point.value, value
