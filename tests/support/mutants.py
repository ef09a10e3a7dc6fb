"""Runs planted mistakes from the tables of ``tests/rules/mistakes/``, and has the parts of these tables."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

import mcore_bridge as mb
from mcore_bridge.errors import BridgeError
from mcore_bridge.factory.modules.torch_modules import Norm
from mcore_bridge.rules.layout import Rearrange
from mcore_bridge.rules.mapping import WeightMapping
from tests import zoo
from tests.support import stepping, tiny
from tests.support.bounds import BOUND
from tests.support.parity import logits_of, worst_differences
from tests.support.strategies import random_state


def parts(*order: int):
    """The parts in another order."""
    return lambda rule: replace(rule, hf=tuple(rule.hf[index] for index in order))


def exchange(one: str, other: str):
    """A mistake that exchanges the HF names of two parameters. In layers, it changes layers of the decoder."""

    def mutate(rules):
        hf = {rule.mcore: rule.hf for rule in rules if not rule.mcore.startswith("mtp.") and not rule.copy}
        (first,) = (name for name in hf if name.endswith(one))
        (second,) = (name for name in hf if name.endswith(other))
        switched = {first: hf[second], second: hf[first]}
        return [rule if rule.copy else replace(rule, hf=switched.get(rule.mcore, rule.hf)) for rule in rules]

    return mutate


def of(suffix: str, change):
    """A mistake in the rule whose mcore name ends in ``suffix``; None removes the rule."""

    def mutate(rules):
        assert any(rule.mcore.endswith(suffix) for rule in rules)
        changed = [change(rule) if rule.mcore.endswith(suffix) else rule for rule in rules]
        return [rule for rule in changed if rule is not None]

    return mutate


def laid_out(layout):
    return lambda rule: replace(rule, layout=layout)


DEALT_ROW = Rearrange("n (m tp)", "tp n m")


def instead(owner: Any, name: str, wrong: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Replace an attribute by something wrong."""
    return lambda: mock.patch.object(owner, name, wrong)


def itself(first: Any, *others: Any) -> Any:
    return first


def nothing(*arguments: Any) -> None:
    return None


def with_epsilon_of_mcore(self, config, hidden_size, eps=1e-5):
    Norm.__init__(self, config, hidden_size, eps)


ERRORS = {
    "shapes": "has shape|does not fit|takes|parts",
    "no rule": "no rule",
    "names": "missing|unexpected",
    "numbers": "as many numbers",
    "logits": "^logits$",
}


def module(family: str) -> Any:
    return importlib.import_module(f"tests.rules.mistakes.{family}")


def table(family: str, name: str) -> dict[str, Any]:
    """A table of a family, without models that the installed releases do not support."""
    rows = getattr(module(family), name, {})
    model_at = 1 if name == "RULES" else 0
    return {key: row for key, row in rows.items() if not isinstance(row[model_at], str) or zoo.here([row[model_at]])}


def hf_of(model: Any) -> Any:
    """A new config for a case of the zoo. A config is returned unchanged."""
    return zoo.cases()[model].hf if isinstance(model, str) else model


@contextlib.contextmanager
def mutated(mutate: Callable[[list[Any]], list[Any]]) -> Iterator[None]:
    """Every architecture with a mistake in its rules."""
    true = WeightMapping.__init__

    def mistaken(self, rules, *others, **options):
        true(self, tuple(mutate(list(rules))), *others, **options)

    with mock.patch.object(WeightMapping, "__init__", mistaken):
        yield


def fates(family: str, dims: mb.ParallelDims, jobs: list[tuple[str | None, Any, Any]]) -> list[str]:
    """Runs in each worker: the check that finds each mistake in rules. A job is a name or None, a model, a
    reference.
    """
    rules = table(family, "RULES")
    return [fate(rules[name][2] if name else itself, hf_of(model), dims, truth) for name, model, truth in jobs]


def fate(mutate: Any, hf: Any, dims: mb.ParallelDims, reference: Any) -> str:
    """The text of an error, "bits", "logits", or "survives". The mesh is kept for the next mistake."""
    with mutated(mutate):
        try:
            stepping.meet(dims)
            state = random_state(hf)
            models = mb.build_model(hf, dims=dims, dtype=torch.float32, device="cpu", load_weights=state)
            exported = mb.to_hf_state_dict(models)
            if exported.keys() != state.keys() or not all(torch.equal(exported[key], state[key]) for key in state):
                return "bits"
            worst = (logits_of(*models, dims, reference.shape[1]) - reference).abs().max() / reference.std()
        except BridgeError as error:
            return str(error)
    return "survives" if worst < BOUND else "logits" if worst > 50 * BOUND else f"hardly moves: {worst / BOUND}"


def differences(family: str, dims: mb.ParallelDims, jobs: list[tuple[str | None, Any, Any]]) -> list[float]:
    """Runs in each worker: the change of logits by each mistake in modules, or None. Jobs are as for ``fates``."""
    modules, found = table(family, "MODULES"), []
    for name, model, truth in jobs:
        plant, hf = modules[name][2] if name else {}, deepcopy(hf_of(model))
        if isinstance(plant, dict):
            for field, value in plant.items():
                setattr(hf, field, value)
        with contextlib.nullcontext() if isinstance(plant, dict) else plant():
            found += worst_differences([(hf, dims, truth)])
    return found


def gradients(family: str, jobs: list[tuple[str, bool, str, dict[str, torch.Tensor]]]) -> list[float]:
    """Runs in each worker: the change of a gradient by each mistake, or by none."""
    found = []
    for name, planted, folder, expected in jobs:
        _, dims, plant = table(family, "GRADIENTS")[name]
        with stepping.mesh(dims), plant() if planted else contextlib.nullcontext():
            grads = stepping.train(folder, dims, tiny.tokens(4))["grads"]
            found.append(max(tiny.relative_error(grads[key], expected[key]) for key in expected))
    return found
