"""Planted mistakes: each is one slip in a table or a name, and the tests of the given tier must detect it.

A wrong permutation is still a permutation: mistakes that only ``logits`` finds pass every round trip and every check of
shapes. The tables are in ``mistakes/``. Controls without a mistake must pass.
"""

import pkgutil
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge.errors import BridgeError
from mcore_bridge.rules.names import Numbering
from mcore_bridge.weights import model_tensors, provenance
from tests.rules import mistakes
from tests.rules.mistakes.biased import FUSED
from tests.rules.mistakes.dense import HF
from tests.rules.mistakes.experts import SHARED
from tests.support import bailing, bailing_logits, mutants, pool, stepping
from tests.support import tiny as tinies
from tests.support.bounds import BOUND, FOUR, ONE, TWO
from tests.support.mutants import ERRORS, table
from tests.support.parity import reference_logits, reference_of
from tests.support.strategies import on_disk, random_state, tiny

FAMILIES = [module.name for module in pkgutil.iter_modules(mistakes.__path__)]
RULES = [(family, name) for family in FAMILIES for name in table(family, "RULES")]
MODULES = [
    (family, dims)
    for family in FAMILIES
    for dims in (ONE, TWO, FOUR)
    if any(mesh == dims for _, mesh, _ in table(family, "MODULES").values())
]


_references: dict[int, torch.Tensor] = {}


def reference(model: Any) -> torch.Tensor:
    """transformers' logits of a case of the zoo, or of a config."""
    if isinstance(model, str):
        return reference_of(model)
    if id(model) not in _references:
        _references[id(model)] = reference_logits(model)
    return _references[id(model)]


def found(function: Any, family: str, dims: mb.ParallelDims, models: dict[str, Any]) -> list[dict[str, Any]]:
    """The effect of each mistake on a mesh, by rank and name. Names of controls begin with ``no mistake``."""
    true = {
        f"no mistake {number}": model for number, model in enumerate({id(hf): hf for hf in models.values()}.values())
    }
    jobs = [(name, model, reference(model)) for name, model in models.items()]
    jobs += [(None, model, reference(model)) for model in true.values()]
    ranks = pool.run(dims.tp, function, family, dims, jobs, timeout=300)
    return [dict(zip([*models, *true], rank, strict=True)) for rank in ranks]


@cache
def fates(family: str, dims: mb.ParallelDims) -> list[dict[str, str]]:
    """The checks that find each mistake in rules. On one rank, only mistakes that no check may find there run."""
    rules = table(family, "RULES")
    models = {name: model for name, (tier, model, _) in rules.items() if dims != ONE or tier.endswith(" at tp=2")}
    return found(mutants.fates, family, dims, models)


@pytest.mark.parametrize(("family", "name"), RULES)
def test_rules_are_killed(family: str, name: str) -> None:
    tier, _, on_several_ranks = table(family, "RULES")[name][0].partition(" at tp=")
    for fate in fates(family, TWO):
        assert re.search(ERRORS[tier], fate[name]), fate[name]
    if on_several_ranks:  # this is why every check also runs on several ranks
        assert fates(family, ONE)[0][name] == "survives"


@pytest.mark.parametrize("family", sorted({family for family, _ in RULES}))
def test_the_true_rules_survive(family: str) -> None:
    for dims in (ONE, TWO):
        for fate in fates(family, dims):
            assert {fate[name] for name in fate if name.startswith("no mistake")} <= {"survives"}


@pytest.mark.parametrize(("family", "dims"), MODULES, ids=str)
def test_modules_are_killed_by_logits(family: str, dims: mb.ParallelDims) -> None:
    modules = table(family, "MODULES")
    least = getattr(mutants.module(family), "LEAST", 50)
    if dims != ONE:
        unseen = {name: model for name, (model, mesh, _) in modules.items() if mesh == dims}
        (alone,) = found(mutants.differences, family, ONE, unseen)
        assert {name: worst for name, worst in alone.items() if worst > BOUND} == {}
    killed = {name: model for name, (model, mesh, _) in modules.items() if mesh == dims}
    for worst in found(mutants.differences, family, dims, killed):
        true = {name for name in worst if name.startswith("no mistake")}
        assert {name: worst[name] for name in true if worst[name] > BOUND} == {}
        assert {name: worst[name] for name in worst.keys() - true if worst[name] < least * BOUND} == {}


@pytest.mark.parametrize("family", [family for family in FAMILIES if table(family, "GRADIENTS")])
def test_killed_by_gradients(tmp_path: Path, family: str) -> None:
    jobs, mistakes_of = [], table(family, "GRADIENTS")
    for number, (name, (hf, _, _)) in enumerate(mistakes_of.items()):
        folder = str(tinies.random_checkpoint(hf, tmp_path / str(number)))
        model = tinies.random_model(hf)
        expected = on_disk(model, tinies.reference(model, tinies.tokens(4))[2])
        jobs += [(name, True, folder, expected), (name, False, folder, expected)]
    for errors in pool.run(2, mutants.gradients, family, jobs):
        assert min(errors[::2]) > 1e-3, dict(zip(mistakes_of, errors[::2], strict=True))
        assert max(errors[1::2]) < 5e-5


def fused_mistaken(folder: str, name: str) -> torch.Tensor:
    """Runs in a worker."""
    with mutants.mutated(FUSED[name]):
        return bailing_logits.logits(folder, ONE)


@pytest.mark.parametrize("name", FUSED)
def test_fused_rules_are_killed(tmp_path: Path, name: str) -> None:
    (tmp_path / "ling").mkdir()
    (tmp_path / "twin").mkdir()
    fields = bailing.TINY["grouped"]
    folder = bailing.write(tmp_path / "ling", fields, bailing.twin_state(fields))
    truth = bailing_logits.reference(fields, tmp_path / "twin")
    (ours,) = pool.run(1, fused_mistaken, str(folder), name)
    assert float((ours - truth).abs().max() / truth.std()) > 50 * BOUND


def local_layers(name: str, numbering: Numbering) -> tuple[str, ...]:
    """The numbers of layers within a stage in the place of global numbers."""
    return TRUE_CANONICAL(name, replace(numbering, layers=tuple(range(len(numbering.layers)))))


def local_experts(name: str, numbering: Numbering) -> tuple[str, ...]:
    return TRUE_CANONICAL(name, replace(numbering, experts=tuple(range(len(numbering.experts)))))


def exported_twice(rules: Any) -> Any:
    return tuple(replace(rule, exported=True) for rule in TRUE_TIED(rules))


TRUE_CANONICAL, TRUE_TIED = model_tensors.canonical_names, provenance.tied_lm_head
EXPORTS = {
    "hold the layers [0], expected 0 to 1": (HF, {"pp": 2}, (model_tensors, "canonical_names", local_layers), False),
    "no rank of the group holds the experts [2, 3]": (
        *(SHARED, {"ep": 2}),
        (model_tensors, "canonical_names", local_experts),
        True,
    ),
    "model.embed_tokens.weight has two sources": (
        tiny("llama", tie_word_embeddings=True),
        {"pp": 2},
        (provenance, "tied_lm_head", exported_twice),
        True,
    ),
}
"""The error of the export, and whether only the export raises, since a load finds all tensors that it needs."""


def export(message: str) -> str:
    """Runs in each worker."""
    hf, sizes, mistake, loads = EXPORTS[message]
    dims = mb.ParallelDims(**sizes)
    with mock.patch.object(*mistake), stepping.mesh(dims):
        try:
            state = random_state(hf) if loads else False
            models = mb.build_model(hf, dims=dims, dtype=torch.float32, device="cpu", load_weights=state)
            mb.to_hf_state_dict(models)
        except BridgeError as error:
            return str(error)
    return "survives"


@pytest.mark.parametrize("message", EXPORTS)
def test_killed_by_the_export(message: str) -> None:
    assert all(message in said for said in pool.run(2, export, message))
