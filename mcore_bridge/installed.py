"""The installed release of megatron-core, and the installed packages that add architectures.

A family may need a release of megatron-core. Other packages add architectures by entry points of the group
``mcore_bridge.architectures``. Each entry point loads to an ``Architecture`` or a sequence of them, and may register a
config class with transformers. Entry points are looked up only if a ``model_type`` is unknown.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from packaging.version import Version

from mcore_bridge.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Release:
    """The first release of megatron-core that can build a family, and why earlier releases cannot."""

    version: str
    reason: str

    @property
    def is_installed(self) -> bool:
        """Whether the installed megatron-core is this release or a later one."""
        return Version(megatron_release()) >= Version(self.version)

    def require(self, model_type: str, others: str = "") -> None:
        """Raises ``ConfigError`` unless ``is_installed``, followed by the text of other problems."""
        if not self.is_installed:
            raise ConfigError(
                f"{model_type} needs megatron-core {self.version} or later, found {megatron_release()}: {self.reason}. "
                f"Install megatron-core>={self.version}.{others}"
            )


def megatron_release() -> str:
    """The version of the installed megatron-core."""
    from megatron.core import __version__

    return str(__version__)


GROUP = "mcore_bridge.architectures"


def plugins() -> Iterator[tuple[str, Any]]:
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
