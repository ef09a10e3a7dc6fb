"""Taking the place of modules of a trainer: only before it has them, since it keeps what it has imported from them."""

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


class StandInModule(ModuleType):
    """A module that has the names of one of ours, which is imported once the first of them is asked for.

    So the driver of a trainer needs no megatron-core, and whoever has to be imported before it still is.
    """

    def __init__(self, name: str, home: str) -> None:
        super().__init__(name, f"{home}, in the place of {name}.")
        self.__home = home

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by tools that look through all modules
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(self.__home), name)


def replace_modules(homes: Mapping[str, str]) -> None:
    """Have an import of each of these names give what our module of the other name has.

    Raises:
        ConfigError: another module has one of the names already; then none is taken.
    """
    late = [name for name in homes if not isinstance(sys.modules.get(name), StandInModule | None)]
    if late:
        raise ConfigError(
            f"{', '.join(late)} must not have been imported before mcore_bridge takes the place: name this module in "
            "the trainer's config or environment, as docs/verl.md says, instead of importing it later"
        )
    sys.modules.update({name: StandInModule(name, home) for name, home in homes.items()})
    logger.info("mcore_bridge takes the place of %s", ", ".join(homes))


@functools.cache
def original(name: str) -> ModuleType:
    """The trainer's own module of a name that was taken: for what we leave as it is.

    Raises:
        ConfigError: the trainer has no such module.
    """
    package = importlib.import_module(name.rpartition(".")[0])
    spec = importlib.machinery.PathFinder.find_spec(name, package.__path__)
    if spec is None or spec.loader is None:
        raise ConfigError(f"the trainer that is installed has no module {name}: use a release that docs/verl.md names")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def attribute_of_original(module: str, name: str) -> Any:
    """What the trainer's own ``module`` has, for the ``__getattr__`` of ours: not what an import asks of a module."""
    if name.startswith("__"):
        raise AttributeError(f"the module in the place of {module!r} has no attribute {name!r}")
    return getattr(original(module), name)
