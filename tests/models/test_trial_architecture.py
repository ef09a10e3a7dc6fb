"""One more dense architecture takes one file of at most 30 lines, and passes all checks."""

from pathlib import Path

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge import architecture
from mcore_bridge.architecture import register
from mcore_bridge.errors import ConfigError
from mcore_bridge.weights.load import load_hf_weights
from tests.models import trial_architecture
from tests.support import fake_mesh, pool
from tests.support.parity import reference_logits, worst_differences
from tests.support.strategies import random_state, tiny

HF = tiny("stablelm", num_key_value_heads=2, use_qkv_bias=True, hidden_size=192, attention_dropout=0.1)


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    """Registered for these tests only."""
    monkeypatch.setattr(architecture, "_REGISTRY", dict(architecture.architectures()))
    register(trial_architecture.ARCHITECTURE)


def registered(cases):
    register(trial_architecture.ARCHITECTURE)
    return worst_differences(cases)


def test_it_is_one_small_file():
    assert len(Path(trial_architecture.__file__).read_text().splitlines()) <= 30


def test_its_logits_are_those_of_transformers():
    for dims in (mb.ParallelDims(), mb.ParallelDims(tp=2), mb.ParallelDims(tp=4)):
        for (worst,) in pool.run(dims.tp, registered, [(HF, dims, reference_logits(HF))]):
            assert worst < 2e-5


def test_it_goes_round_on_a_mesh():
    state = random_state(HF)
    held = fake_mesh.build_everywhere(
        HF, mb.ParallelDims(tp=2, pp=2, vp=2), lambda chunks: load_hf_weights(chunks, state), dtype=torch.float32
    )
    exported = fake_mesh.export(held)
    assert exported.keys() == state.keys()
    assert all(torch.equal(exported[name], state[name]) for name in state)


def test_its_config_is_total():
    assert mb.to_transformer_config(HF).attention_dropout == 0.1
    assert mb.to_gpt_arguments(HF)["rotary_percent"] == 0.25
    with pytest.raises(ConfigError, match="use_parallel_residual"):
        mb.to_transformer_config(tiny("stablelm", hidden_size=192, use_parallel_residual=True))
