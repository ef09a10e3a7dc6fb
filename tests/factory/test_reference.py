"""The reference policy: inside ``without_adapters`` the base computes, also in a recompute of such a forward."""

from contextlib import nullcontext, suppress

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.add_adapters import add_adapters
from tests import zoo
from tests.support import pool, stepping, tiny
from tests.support.peft_models import parameters

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
PARTS = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
DENSE = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def built(folder, dims, overrides, targets=DENSE):
    """Chunks with adapters that are not zero, and the log-probs of their base."""
    chunks = mb.build_model(folder, dims=dims, dtype=torch.float32, device="cpu", overrides=overrides)
    base = log_probs(chunks)
    add_adapters(chunks, rank=2, alpha=1, targets=targets)
    for parameter in parameters(chunks):
        torch.nn.init.ones_(parameter) if not parameter.any() else None  # B
    return chunks, base


def log_probs(chunks):
    return mb.forward(chunks, tiny.tokens(2, vocab_size=64), packed=False).log_probs.clone()


def policies(folder, meshes, targets):
    """Run in each worker: compare outputs on each mesh before, within and after ``without_adapters``."""
    for sizes, overrides in meshes:
        with stepping.mesh(mb.ParallelDims(**sizes)):
            chunks, base = built(folder, mb.ParallelDims(**sizes), overrides, targets)
            adapted = log_probs(chunks)
            assert not torch.allclose(adapted, base, atol=1e-3), sizes
            with suppress(KeyError), mb.without_adapters(chunks):
                with mb.without_adapters([*chunks]):
                    assert torch.equal(log_probs(chunks), base), sizes
                assert torch.equal(log_probs(chunks), base), "the inner block ends, the outer goes on"
                raise KeyError
            assert torch.equal(log_probs(chunks), adapted), sizes


def step(chunks, around_forward, around_backward):
    """The gradients of a step, and the output of a forward just before the backward."""
    batch, positions = tiny.tokens(2, vocab_size=64), torch.arange(tiny.SEQ_LEN).expand(2, -1)
    with around_forward:
        loss = chunks[0](batch[:, :-1], positions, None, labels=batch[:, 1:].contiguous()).mean()
    with around_backward:
        seen = log_probs(chunks)
        loss.backward() if loss.requires_grad else None  # the base alone has no gradient
    factors = parameters(chunks)
    found = [torch.zeros(()) if factor.grad is None else factor.grad.clone() for factor in factors]
    for factor in factors:
        factor.grad = None
    return found, seen


def gradients(folder, options):
    """Runs in each worker: gradients of adapters, if forward and backward ran with or without adapters."""
    for overrides in options:
        with stepping.mesh(mb.ParallelDims(tp=2, sp=True)):
            chunks, base = built(folder, mb.ParallelDims(tp=2, sp=True), overrides)
            on, off = nullcontext(), mb.without_adapters
            expected, _ = step(chunks, on, on)
            assert all(gradient.any() for gradient in expected)
            found, reference = step(chunks, on, off(chunks))
            assert torch.equal(reference, base)
            assert all(map(torch.equal, found, expected)), overrides
            assert not any(gradient.any() for gradient in step(chunks, off(chunks), on)[0]), overrides
            assert all(map(torch.equal, step(chunks, on, on)[0], expected)), overrides


def test_inside_a_block_the_policy_is_the_base(tmp_path):
    tiny.random_checkpoint(tiny.config("qwen3", vocab_size=64), tmp_path / "dense")
    pool.run(2, policies, str(tmp_path / "dense"), [({"tp": 2, "sp": True}, {}), ({"pp": 2, "vp": 2}, FULL)], DENSE)
    pool.run(2, gradients, str(tmp_path / "dense"), [{}, FULL, PARTS])
    if "deepseek_v32" in zoo.cases():  # its attention reads a weight, and does not run the layer
        tiny.random_checkpoint(zoo.cases()["deepseek_v32"].hf, tmp_path / "sparse")
        pool.run(1, policies, str(tmp_path / "sparse"), [({}, {})], ("kv_b_proj",))


def test_a_policy_without_adapters_is_no_reference_of_itself(tmp_path):
    tiny.random_checkpoint(tiny.config("qwen3", vocab_size=64), tmp_path)
    with pytest.raises(ConfigError, match="found none: the policy would be its own reference"):
        pool.run(1, refused, str(tmp_path))


def refused(folder):
    with stepping.mesh(mb.ParallelDims()):
        chunks = mb.build_model(folder, dims=mb.ParallelDims(), dtype=torch.float32, device="cpu")
        with mb.without_adapters(chunks):
            pass
