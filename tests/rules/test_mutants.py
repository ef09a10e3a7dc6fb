"""Planted mistakes: each is one slip in a table or a name, and the tests of the stated tier must detect it.

A wrong bijection is still a bijection: those that only ``logits`` kills pass every round trip and every shape check.
"""

import re
from dataclasses import replace

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge.errors import BridgeError
from mcore_bridge.rules.names import Numbering
from mcore_bridge.weights import model_tensors
from tests.support import pool
from tests.support.mutants import ERRORS, MUTANTS, fate
from tests.support.parity import reference_logits
from tests.support.strategies import random_state, tiny

HF = tiny("qwen3", vocab_size=97, num_hidden_layers=2, attention_bias=True)
SQUARE = tiny("qwen3", vocab_size=97, num_hidden_layers=2, hidden_size=64, head_dim=8, attention_bias=True)


def fates(tp: int, cases) -> list[str]:
    return [fate(name, hf, tp, reference) for name, hf, reference in cases]


@pytest.fixture(scope="module")
def found():
    """The fate of every mutant at tp 1 and 2."""
    references = {id(hf): reference_logits(hf) for hf in (HF, SQUARE)}
    found = {}
    for tp in (1, 2):
        names = [name for name, (tier, _) in MUTANTS.items() if tp == 2 or tier.endswith(" at tp=2")]
        cases = [(name, hf, references[id(hf)]) for name in names for hf in (HF, SQUARE)]
        fate_of = pool.run(tp, fates, tp, cases, timeout=300)[0]
        found |= {(name, tp): fate_of[2 * index : 2 * index + 2] for index, name in enumerate(names)}
    return found


@pytest.mark.parametrize("name", MUTANTS)
def test_killed(found, name):
    tier, _, tp = MUTANTS[name][0].partition(" at tp=")
    for fate_at_two in found[name, 2]:
        if tier == "logits":
            assert fate_at_two == "logits"
        else:
            assert re.search(ERRORS[tier], fate_at_two), fate_at_two
    if tp:  # invisible on one rank: why every check runs at tp 2 too
        assert found[name, 1] == ["survives", "survives"]


def test_the_true_mapping_survives():
    """The oracle itself: without a mistake nothing is killed."""
    MUTANTS["none"] = ("", lambda rules: rules)
    try:
        assert pool.run(2, fates_unmutated, 2, HF, reference_logits(HF)) == ["survives", "survives"]
    finally:
        del MUTANTS["none"]


def fates_unmutated(tp, hf, reference):
    MUTANTS["none"] = ("", lambda rules: rules)
    return fate("none", hf, tp, reference)


def local_layer_numbers():
    """``canonical`` that takes a stage's own layer numbers for global ones."""
    true = model_tensors.canonical
    model_tensors.canonical = lambda name, numbering: true(name, Numbering(tuple(range(len(numbering.layers)))))
    dims = mb.ParallelDims(pp=2)
    try:
        dims.initialize(device="cpu")
        models = mb.build_model(HF, dims=dims, dtype=torch.float32, device="cpu", load_weights=False)
        mb.to_hf_state_dict(models)
    except BridgeError as error:
        return str(error)
    finally:
        model_tensors.canonical = true
    return "survives"


def test_killed_layer_offset_ignored():
    for message in pool.run(2, local_layer_numbers):
        assert "hold the layers [0], expected 0 to 1" in message


def tie_exported_twice():
    from mcore_bridge.weights import provenance

    true = provenance.tied_lm_head
    provenance.tied_lm_head = lambda rules: tuple(replace(rule, exported=True) for rule in true(rules))
    hf = tiny("llama", tie_word_embeddings=True)
    dims = mb.ParallelDims(pp=2)
    try:
        dims.initialize(device="cpu")
        models = mb.build_model(hf, dims=dims, dtype=torch.float32, device="cpu", load_weights=random_state(hf))
        mb.to_hf_state_dict(models)
    except BridgeError as error:
        return str(error)
    finally:
        provenance.tied_lm_head = true
    return "survives"


def test_killed_tied_head_exported_twice():
    for message in pool.run(2, tie_exported_twice):
        assert "model.embed_tokens.weight has two sources" in message
