"""Gradients after ``forward`` equal the gradients of one rank, on every mesh, with and without megatron-core's DDP."""

import pytest
import torch
from megatron.core import parallel_state

import mcore_bridge as mb
from tests import zoo
from tests.support import pool, stepping
from tests.support.strategies import random_state, tiny

ROWS, SEQ, SIZE = 3, 11, 2
"""The batch of each replica. Its second microbatch has one row."""
D = mb.ParallelDims
CASES = [  # models, the number of ranks, and meshes
    ("dense", 2, D()),
    ("dense", 2, D(tp=2)),
    ("dense", 4, D(pp=2, cp=2)),
    ("dense", 4, D(tp=2, pp=2, vp=2, sp=True)),
    ("qwen3_moe", 2, D(tp=2, sp=True, etp=1)),
    ("qwen3_moe", 4, D(tp=2, ep=2, sp=True)),
    ("qwen3_moe", 4, D(cp=2, ep=4)),
    ("deepseek_v3", 2, D(tp=2, sp=True)),
    ("qwen3_next", 2, D(tp=2, sp=True)),
    ("nemotron_h", 2, D(tp=2, sp=True)),
]
NAMES = {"dense", *zoo.cases()}


def config_of(name):
    """A dense model has a tied embedding, and norms of queries and keys."""
    small = {"num_key_value_heads": 2, "tie_word_embeddings": True, "vocab_size": 97}
    return tiny("qwen3", **small) if name == "dense" else zoo.cases()[name].hf


def batch_of(hf, replicas):
    """Rows of odd lengths, for all replicas."""
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(0, hf.vocab_size, (replicas * ROWS, SEQ), generator=generator)
    lengths = torch.randint(3, SEQ + 1, (replicas * ROWS, 1), generator=generator)
    return ids, (torch.arange(SEQ) < lengths).long(), torch.randn(ids.shape, generator=generator)


def steps(name, dims, replicas, wraps):
    """Gradients of the sum over all rows, by HF name, with DDP and without; and the names that each lacks."""
    hf, found = config_of(name), []
    with stepping.mesh(dims):
        rank, count = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        share = [each.chunk(count)[rank] for each in batch_of(hf, replicas)]
        for wrapped in wraps:
            chunks = mb.build_model(hf, dims=dims, dtype=torch.float32, device="cpu", load_weights=random_state(hf))
            models = stepping.wrap(chunks) if wrapped else chunks
            again = 1 if wrapped else 2  # the second backward adds to the gradients of the first
            for _ in range(again):
                ids, mask, weights = share
                loss = lambda out, rows: (out.log_probs * weights[rows]).sum()  # noqa: E731, B023
                mb.forward(models, ids, mask, loss=loss, micro_batch_size=SIZE)
            microbatches = -(-len(ids) // SIZE) * count
            found.append(gradients_of(chunks, "main_grad" if wrapped else "grad", microbatches / again))
            assert (chunks[0].config.finalize_model_grads_func is not None) == wrapped
    return found


@torch.no_grad()
def gradients_of(chunks, name, factor):
    """Gradients have the places of their parameters, so that the export gives them HF names."""
    for parameter in stepping.trained(chunks):
        parameter.copy_(getattr(parameter, name) * factor)
    found = {name: tensor.clone() for name, tensor in mb.to_hf_state_dict(chunks).items()}
    assert sum(bool(tensor.any()) for tensor in found.values()) > 0.8 * len(found)  # some experts have no token
    return found


@pytest.mark.parametrize(("name", "world", "dims"), [each for each in CASES if each[0] in NAMES], ids=str)
def test_gradients_are_those_of_one_rank(name, world, dims):
    """Gradients are a mean over replicas, and a sum over accumulated batches. Norms are not 1, and no two values are
    equal.
    """
    replicas = world // (dims.tp * dims.cp * dims.pp)
    (((expected,)),) = pool.run(1, steps, name, D(), replicas, [False])
    for bare, wrapped in pool.run(world, steps, name, dims, replicas, [False, True]):
        for found, where in ((bare, "bare"), (wrapped, "in DDP")):
            assert found.keys() == expected.keys()
            for key, gradient in expected.items():
                worst = float((found[key] - gradient).abs().max())
                assert worst <= 2e-4 * float(gradient.abs().max()), f"{key} {where}: {worst}"
