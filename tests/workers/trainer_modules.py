"""Imports modules of trainers from a checkout, without the packages that they need for other work, and on a CPU."""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Collection, Iterator
from typing import Any
from unittest import mock


class _Open(type):
    """The type of classes with any attribute, also within unions of types."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Open(name, (Anything,), {})

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls


class Anything(metaclass=_Open):
    """A class that can be called with anything, also as a decorator, which changes nothing."""

    def __new__(cls, *args: Any, **_: Any) -> Any:
        """The function that is decorated, or an object."""
        return args[0] if args and callable(args[0]) else super().__new__(cls)

    def __call__(self, *args: Any, **_: Any) -> Any:
        """As above, for decorators with arguments."""
        return args[0] if args and callable(args[0]) else self

    def __class_getitem__(cls, _: Any) -> Any:
        """Also generic."""
        return cls


class EmptyModule(types.ModuleType):
    """A module in which every name is a class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Open(name, (Anything,), {})


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds empty modules for some packages, unless they are installed."""

    def __init__(self, packages: Collection[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec of an empty module."""
        if not any(name == package or name.startswith(f"{package}.") for package in self.packages):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        """An empty module."""
        return EmptyModule(spec.name)

    def exec_module(self, module: Any) -> None:
        """It stays empty."""


@contextlib.contextmanager
def switched_on(ours: str, absent: Collection[str]) -> Iterator[None]:
    """Import our module ``ours``, as a line of its page does. Afterwards no module of the trainer is left."""
    before = {*sys.modules}
    sys.modules.pop(ours, None)
    with mock.patch.object(sys, "meta_path", [*sys.meta_path, Absent(absent)]):
        importlib.import_module(ours)
        try:
            yield
        finally:
            root = ours.rpartition(".")[2].removeprefix("in_")
            for name in {*sys.modules} - before:
                if name.partition(".")[0] in (root, *absent) or name.startswith("megatron.bridge"):
                    del sys.modules[name]
