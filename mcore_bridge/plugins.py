"""Architectures of other packages: the entry points of the group ``mcore_bridge.architectures``.

Each loads to an ``Architecture`` or a sequence of them. Loading may also register a config class with transformers.
Entry points are looked up only when a ``model_type`` is unknown.
"""

from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

from mcore_bridge.errors import ConfigError

GROUP = "mcore_bridge.architectures"


def load() -> Iterator[tuple[str, Any]]:
    """Yield name and value of every entry point. They are not cached, because ``sys.path`` may change later.

    Raises:
        ConfigError: an entry point does not load. The message names the entry point and its error.
    """
    for entry_point in entry_points(group=GROUP):
        try:
            value = entry_point.load()
        except Exception as error:  # a broken package may raise anything
            raise ConfigError(
                f"The entry point {entry_point.value!r} of {GROUP!r} must load, but raises: {error!r}. Update or "
                "uninstall its package."
            ) from error
        yield entry_point.value, value
