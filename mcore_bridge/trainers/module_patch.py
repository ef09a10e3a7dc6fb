"""Replaces modules of a trainer. This must happen before the trainer imports names from them."""

import contextlib
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

MEGATRON_BRIDGE = {
    "megatron.bridge": "mcore_bridge.trainers.megatron_bridge",
    "megatron.bridge.peft.lora": "mcore_bridge.trainers.bridge_classes",
    "megatron.bridge.peft.canonical_lora": "mcore_bridge.trainers.bridge_classes",
    "megatron.bridge.models.conversion.peft_bridge": "mcore_bridge.trainers.bridge_classes",
    "megatron.bridge.training.config": "mcore_bridge.trainers.bridge_classes",
}
"""The modules of Megatron-Bridge from which trainers import, and our modules in their places."""
logger = logging.getLogger("mcore_bridge")


Home = str | Mapping[str, str]
"""Our replacement for a trainer's module: one module, or a module for each name that is replaced."""


class StandInModule(ModuleType):
    """A module that forwards names to our module, which is imported when the first of them is used.

    So the driver of a trainer needs no megatron-core, and other modules can still be imported before megatron-core. If
    only some names are replaced, other names come from the trainer's module.
    """

    def __init__(self, name: str, home: Home) -> None:
        super().__init__(name, f"{home}, in the place of {name}.")
        self.__home = home

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # for tools that inspect all modules
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        home = self.__home if isinstance(self.__home, str) else self.__home.get(name)
        if home != self.__home:  # our module may need the trainer's, whose package may ask for this name at its import
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(self.__name__.rpartition(".")[0])
        return getattr(original(self.__name__) if home is None else importlib.import_module(home), name)


def replace_modules(homes: Mapping[str, Home]) -> None:
    """Replace modules of a trainer by placeholders that load this library's modules.

    Args:
        homes: the trainer's modules by name, each with its replacement.

    Raises:
        ConfigError: one of the trainer's modules is imported already. Then none is replaced.
    """
    late = [name for name in homes if not isinstance(sys.modules.get(name), StandInModule | None)]
    if late:
        raise ConfigError(
            f"{', '.join(late)} must not have been imported before mcore_bridge takes the place: name or import this "
            "module where the trainer's page in docs/trainers says, instead of importing it later"
        )
    sys.modules.update({name: StandInModule(name, home) for name, home in homes.items()})
    logger.info("mcore_bridge takes the place of %s", ", ".join(homes))


def original(name: str) -> ModuleType:
    """The trainer's original module, for names that are not replaced.

    Raises:
        ConfigError: the trainer has no such module.
    """
    package = importlib.import_module(name.rpartition(".")[0])  # which may itself ask for this module, at its import
    return _loaded(name, tuple(package.__path__))


@functools.cache
def _loaded(name: str, path: tuple[str, ...]) -> ModuleType:
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(
            f"the installed trainer has no module {name}: use a release in the table of docs/trainers/verl.md"
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
