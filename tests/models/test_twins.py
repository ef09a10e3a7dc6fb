"""Families that transformers lacks have the logits of an equivalent family. ``test_bailing.py`` tests more of Ling."""

import pytest
import torch

from tests.support import pool
from tests.support.bounds import BOUND, FOUR, ONE, TWO
from tests.support.gpu_models import FAMILIES
from tests.support.parity import reference_logits, worst_differences
from tests.support.strategies import random_state
from tests.support.twins import TWINS


def difference(family, dims, reference):
    """Runs in each worker, since such configs cannot be pickled."""
    return worst_differences([(FAMILIES[family], dims, reference)])[0]


@pytest.fixture(scope="module")
def references():
    return {family: reference_logits(FAMILIES[family]) for family in TWINS}


@pytest.mark.parametrize("dims", [ONE, TWO, FOUR], ids=str)
@pytest.mark.parametrize("family", TWINS)
def test_logits_are_those_of_the_twin(references, family, dims):
    assert max(pool.run(dims.tp, difference, family, dims, references[family])) < BOUND


@pytest.mark.parametrize("family", TWINS)
def test_names_go_to_the_twin_and_back(family):
    hf, twin = FAMILIES[family], TWINS[family]
    state = random_state(hf)
    again = twin.named(twin.unnamed(state, hf))
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], state[name]) for name in state)
