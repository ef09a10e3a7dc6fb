"""Replaces modules of a trainer. This must happen before it imports them, because it keeps what it has imported."""

import functools
import importlib
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from mcore_bridge.errors import ConfigError

logger = logging.getLogger("mcore_bridge")


Home = str | Mapping[str, str]
"""Our module in the place of a trainer's, or our modules by the names that they replace."""


class StandInModule(ModuleType):
    """A module with names of ours. Our module is imported when the first such name is used.

    So the driver of a trainer needs no megatron-core, and modules that must be imported before megatron-core can be.
    If only some names are replaced, the others are the trainer's own.
    """

    def __init__(self, name: str, home: Home) -> None:
        super().__init__(name, f"{home}, in the place of {name}.")
        self.__home = home

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # for tools that inspect all modules
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        home = self.__home if isinstance(self.__home, str) else self.__home.get(name)
        return getattr(original(self.__name__) if home is None else importlib.import_module(home), name)


def replace_modules(homes: Mapping[str, Home]) -> None:
    """Replace modules by stand-ins for ours.

    Args:
        homes: the names of the trainer's modules, and where their names are with us.

    Raises:
        ConfigError: one of the trainer's modules is imported already. Then none is replaced.
    """
    late = [name for name in homes if not isinstance(sys.modules.get(name), StandInModule | None)]
    if late:
        raise ConfigError(
            f"{', '.join(late)} must not have been imported before mcore_bridge takes the place: name this module in "
            "the trainer's config or environment, as docs/trainers/verl.md says, instead of importing it later"
        )
    sys.modules.update({name: StandInModule(name, home) for name, home in homes.items()})
    logger.info("mcore_bridge takes the place of %s", ", ".join(homes))


@functools.cache
def original(name: str) -> ModuleType:
    """The trainer's own module that was replaced, for names that we do not change.

    Raises:
        ConfigError: the trainer has no such module.
    """
    package = importlib.import_module(name.rpartition(".")[0])
    spec = importlib.machinery.PathFinder.find_spec(name, package.__path__)
    if spec is None or spec.loader is None:
        raise ConfigError(
            f"the trainer that is installed has no module {name}: use a release that docs/trainers/verl.md names"
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
