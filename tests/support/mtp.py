"""Models with layers for multi-token prediction."""

import torch

from mcore_bridge.weights.load import load_hf_weights
from tests.support import fake_mesh, mtp_checkpoints


def published(num_mtp_layers, name="glm4_moe"):
    """A config, and the tensors of its checkpoint."""
    hf = mtp_checkpoints.config(name, num_mtp_layers)
    return hf, mtp_checkpoints.published(hf, num_mtp_layers)


def goes_round(hf, state, dims, num_mtp_layers):
    overrides = {"mtp_num_layers": num_mtp_layers}
    held = fake_mesh.build_everywhere(
        hf, dims, lambda chunks: load_hf_weights(chunks, state), dtype=torch.float32, overrides=overrides
    )
    exported = fake_mesh.export(held)
    assert exported.keys() == state.keys()
    assert all(torch.equal(exported[name], state[name]) for name in state)
