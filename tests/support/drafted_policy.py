"""The policy of tests of draft heads, a batch for it, and transformers' model of it."""

import functools
import tempfile

import torch

import mcore_bridge as mb
from tests.support import tiny
from tests.support.parity import reference_model
from tests.support.strategies import random_state

POLICY = tiny.config("qwen3", num_hidden_layers=8, num_key_value_heads=2)
BOUND = 2e-5


def batch():
    """The first row is shorter than the second, has an odd length, and is padded on the left."""
    ids = torch.randint(0, POLICY.vocab_size, (2, 12), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return ids * mask, mask


@functools.cache
def reference():
    """transformers' model of the policy."""
    with tempfile.TemporaryDirectory() as folder:
        return reference_model(POLICY, folder, random_state(POLICY))


def policy(dims, **options):
    how = {"dtype": torch.float32, "device": "cpu", "load_weights": random_state(POLICY)}
    return mb.build_model(POLICY, dims=dims, **{**how, **options})
