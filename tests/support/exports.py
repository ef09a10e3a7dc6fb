"""Models to export, and the comparison of exports."""

import torch

import mcore_bridge as mb
from tests.support.strategies import random_state, tiny

MESH = mb.ParallelDims(tp=2, pp=2, sp=True)


BUCKET = 1 << 14  # the size of a few parameters, so that exports take many buckets


def built(dims=MESH, hf=None, **arguments):
    """This rank's chunks, loaded with ``random_state``; and that state."""
    hf = hf or tiny("qwen3", vocab_size=97)
    dims.initialize(device="cpu")
    state = random_state(hf)
    arguments = {"dtype": torch.float32, "device": "cpu", "load_weights": state, **arguments}
    return mb.build_model(hf, dims=dims, **arguments), state


def assert_own_memory(exported):
    """Assert that each tensor can be changed alone, also if HF has several names for one tensor."""
    storages = [tensor.untyped_storage().data_ptr() for tensor in exported.values() if tensor.numel()]
    assert len({*storages}) == len(storages)


def assert_exact(exported, state):
    assert_own_memory(exported)
    assert exported.keys() == state.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor, state[name]), name
