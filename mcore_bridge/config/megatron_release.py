"""The release of megatron-core that a family needs."""

from dataclasses import dataclass

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
        return Version(installed()) >= Version(self.version)

    def require(self, model_type: str, others: str = "") -> None:
        """Raises ``ConfigError`` unless ``is_installed``, followed by the text of other problems."""
        if not self.is_installed:
            raise ConfigError(
                f"{model_type} needs megatron-core {self.version} or later, found {installed()}: {self.reason}. "
                f"Install megatron-core>={self.version}.{others}"
            )


def installed() -> str:
    """The version of the installed megatron-core."""
    from megatron.core import __version__

    return str(__version__)
