"""Round trips on drawn meshes."""

import torch

from mcore_bridge.weights.load import load_hf_weights
from tests.support import fake_mesh
from tests.support.fusions import require_together
from tests.support.strategies import random_state


def check(hf, dims, *, dtype=torch.float32, bucket_bytes=1 << 14):
    """Load over NaN on all ranks, export, and compare bits. Every parameter of every rank must be written."""
    state = random_state(hf, dtype=dtype)
    held = fake_mesh.build_everywhere(hf, dims, lambda chunks: load_hf_weights(chunks, state), dtype=dtype)
    for bound, _ in held:
        for name, tensor in bound.tensors.items():
            assert not fake_mesh.is_blank(tensor).any(), f"{name} was not written whole"
    exported = fake_mesh.export(held, bucket_bytes=bucket_bytes)
    assert exported.keys() == state.keys()
    for name, tensor in exported.items():
        assert tensor.dtype == (dtype if state[name].is_floating_point() else state[name].dtype)
        assert torch.equal(tensor, state[name]), name
    require_together(fake_mesh.plan_of(held, bucket_bytes=bucket_bytes), bucket_bytes)
