"""EAGLE3 heads beside a policy: losses, logits and gradients on any mesh against plain torch, folders, refusals."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, LlamaConfig

import mcore_bridge as mb
from mcore_bridge.errors import BatchError, CheckpointError, ConfigError, MeshError
from tests.support import eagle3, pool, stepping, tiny
from tests.support.parity import reference_model
from tests.support.strategies import random_state

POLICY = tiny.config("qwen3", num_hidden_layers=8, num_key_value_heads=2)
SHARED = eagle3.fields_of(POLICY)
OWN = eagle3.fields_of(
    POLICY,
    hidden_size=40,
    target_hidden_size=POLICY.hidden_size,
    attention_bias=True,
    norm_before_residual=True,
    eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 3, 6], "use_aux_hidden_state": True},
    eagle_aux_hidden_state_layer_ids=[1, 4, 7],
    rope_theta=500.0,
)
CASES = {"shared": (SHARED, False, (2, 4, 5)), "own": (OWN, True, (1, 4, 7))}
"""The config of a head, whether it has an embedding, and the layers of the policy whose inputs it reads."""
MESHES = [{}, {"tp": 2, "sp": True}, {"tp": 2}, {"cp": 2}, {"tp": 4, "sp": True}, {"tp": 2, "cp": 2, "sp": True}]
LENGTHS = (9, 12)
BOUND = 2e-5


def batch():
    """The first row is shorter than the second, has an odd length, and is padded on the left."""
    ids = torch.randint(0, POLICY.vocab_size, (2, 12), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return ids * mask, mask


def expected(name, state, mistake=""):
    """The losses of the batch, their mean gradient over two microbatches, and the logits of the second row."""
    fields, _, layers = CASES[name]
    state = {key: value.clone().requires_grad_(value.is_floating_point()) for key, value in state.items()}
    ids, mask = batch()
    model, found = reference(), torch.zeros(ids.shape)
    for row in range(len(ids)):
        start = int(mask[row].argmax())
        each, logits = eagle3.losses(fields, state, model, ids[row, start:], layers, mistake)
        found[row, start + 1 :] = each
    (found.sum() / 2).backward()
    grads = {key: value.grad for key, value in state.items() if value.is_floating_point()}
    return found.detach(), grads, logits.detach()


def reference(tmp=[]):  # noqa: B006
    """transformers' model of the policy, made once."""
    if not tmp:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            tmp.append(reference_model(POLICY, folder, random_state(POLICY)))
    return tmp[0]


def policy(dims, **options):
    how = {"dtype": torch.float32, "device": "cpu", "load_weights": random_state(POLICY)}
    return mb.build_model(POLICY, dims=dims, **{**how, **options})


def train(folder, sizes, packed):
    """Runs in each worker: losses, and gradients and weights under the names of the folder."""
    dims = mb.ParallelDims(**sizes)
    with stepping.mesh(dims):
        models = policy(dims)
        drafts = mb.build_draft(models, folder)
        logits = []
        drafts[0].register_forward_hook(lambda module, inputs, output: logits.append(output.detach()))
        options = {"packed": packed, "micro_batch_size": 1}
        plain = mb.forward(models, *batch())
        outputs = mb.forward(models, *batch(), drafts=drafts, loss=lambda out, rows: out.draft_loss.sum(), **options)
        assert torch.equal(plain.log_probs, mb.forward(models, *batch()).log_probs)
        assert plain.draft_loss is None
        assert not any(parameter.grad is not None and parameter.grad.any() for parameter in models[0].parameters())
        weights = mb.to_hf_state_dict(drafts)
        for parameter in drafts[0].parameters():
            parameter.data = parameter.grad
        return outputs.draft_loss, mb.to_hf_state_dict(drafts), weights, logits[-1]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_every_mesh_trains_a_head_as_plain_torch_does(name, sizes, tmp_path):
    fields, own_embedding, _ = CASES[name]
    state = eagle3.random_head(fields, POLICY, own_embedding=own_embedding)
    folder = eagle3.write(tmp_path, fields, state)
    losses, grads, logits = expected(name, state)
    world = mb.ParallelDims(**sizes).smallest_world
    for found, ours, weights, own in pool.run(world, train, folder, sizes, len(sizes) % 2 == 0):
        assert tiny.relative_error(found, losses) < BOUND
        assert {key: value.dtype for key, value in weights.items()} == {k: v.dtype for k, v in state.items()}
        assert all(torch.equal(weights[key], value) for key, value in state.items())
        for key, grad in grads.items():
            assert tiny.relative_error(ours[key], grad) < 10 * BOUND, key
        if not sizes:
            assert tiny.relative_error(own[0, : len(logits)], logits) < BOUND


@pytest.mark.parametrize("mistake", eagle3.MISTAKES)
def test_the_batch_would_show_a_mistake(mistake):
    state = eagle3.random_head(SHARED, POLICY, own_embedding=False)
    right, wrong = (expected("shared", state, each)[0] for each in ("", mistake))
    assert tiny.relative_error(wrong, right) > 1000 * BOUND
