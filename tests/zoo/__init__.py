"""Small models of every family, by name, for the tests that every family must pass.

Each file of this folder has ``CASES``. ``cases()`` leaves out a case if an installed release is too old: transformers
lacks the ``model_type``, or the architecture needs a later megatron-core. A test that names cases takes them from
``params`` or ``here``, which raise if no file has such a case. Dims are pairwise distinct if the family allows it, so
that a transposed or misplaced matrix cannot fit.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import transformers

from mcore_bridge.architecture import architecture_of
from tests.support.strategies import tiny

NEWEST = not transformers.__version__.startswith("4.")
"""Whether transformers is newer than 4.57, which differs from publishers and later releases in some results."""


@dataclass(frozen=True)
class Case:
    """The HF fields of a small model."""

    model_type: str
    fields: Mapping[str, Any]

    @property
    def hf(self) -> Any:
        """A new HF config."""
        return tiny(self.model_type, **self.fields)


def case(model_type: str, **fields: Any) -> Case:
    """A case with the sizes of ``tiny`` but for ``fields``. Eight query heads, two KV groups."""
    return Case(model_type, {"num_key_value_heads": 2, **fields})


def rope(rope_type: str, theta: float = 10000.0, **fields: Any) -> dict[str, Any]:
    """Rope as the installed transformers spells it, so that the reference computes it."""
    spelled = {"rope_type": rope_type, **fields}
    if not NEWEST:
        return {"rope_theta": theta, "rope_scaling": spelled if fields else None, "max_position_embeddings": 64}
    return {"rope_parameters": {**spelled, "rope_theta": theta}, "max_position_embeddings": 64}


def _is_built(model_type: str) -> bool:
    needed = architecture_of(model_type).megatron_core
    return needed is None or needed.is_installed


@cache
def written() -> dict[str, Case]:
    """Every case by name, including cases that the installed releases do not support."""
    found: dict[str, Case] = {}
    for module in pkgutil.iter_modules(__path__):
        for name, each in importlib.import_module(f"{__name__}.{module.name}").CASES.items():
            assert name not in found, name
            found[name] = each
    return found


@cache
def described() -> dict[str, Case]:
    """The cases for which the installed transformers has a config."""
    return {name: each for name, each in written().items() if each.model_type in transformers.CONFIG_MAPPING}


@cache
def cases() -> dict[str, Case]:
    """The cases that the installed megatron-core can build."""
    return {name: each for name, each in described().items() if _is_built(each.model_type)}


def here(names: Iterable[str]) -> list[str]:
    """The names of cases, without the cases that the installed releases cannot build.

    Raises:
        KeyError: no file has a case of that name.
    """
    return [name for name in names if written()[name] and name in cases()]


def params(names: Iterable[Any], case_of: Callable[[Any], str] = str) -> list[Any]:
    """Parameters of a test, each with the name of a case, or with a key that ``case_of`` turns into a case.

    If the installed releases do not build the case, the test is skipped, which pytest's summary shows.

    Raises:
        KeyError: no file has a case of that name.
    """
    lacks = pytest.mark.skip(reason="the installed transformers or megatron-core lacks the family")
    return [
        pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=[] if here([case_of(each)]) else lacks)
        for each in names
    ]
