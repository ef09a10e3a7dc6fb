"""What an MTP layer predicts is what transformers' own modules compute from the tensors of its publisher."""

import pytest
import torch
import torch.distributed as dist

import mcore_bridge as mb
from tests.support import mtp_checkpoints, pool, stepping
from tests.support.bounds import BOUND


def worst_of(names, dims, references, mistake=lambda state: state):
    """Runs in each worker: the largest difference of each case, relative to the spread of the reference."""
    worst = {}
    for name in names:
        hf = mtp_checkpoints.config(name)
        with stepping.mesh(dims):
            (model,) = mb.build_model(
                hf,
                dims=dims,
                dtype=torch.float32,
                device="cpu",
                load_weights=mistake(mtp_checkpoints.published(hf)),
                overrides={"mtp_num_layers": 1},
            )
            logits = mtp_checkpoints.predicted(model.eval(), hf)
            parts = [torch.empty_like(logits) for _ in range(dims.tp)]
            dist.all_gather(parts, logits.contiguous(), group=model.pg_collection.tp)
        reference = references[name]
        difference = torch.cat(parts, -1)[..., : hf.vocab_size] - reference
        worst[name] = float(difference.abs().max() / reference.std())
    return worst


@pytest.fixture(scope="module")
def references():
    names = mtp_checkpoints.CASES
    return {name: mtp_checkpoints.reference_logits(mtp_checkpoints.config(name)) for name in names}


@pytest.mark.parametrize("dims", [mb.ParallelDims(), mb.ParallelDims(tp=2, sp=True)], ids=str)
def test_predictions_are_those_of_transformers_modules(references, dims):
    for worst in pool.run(dims.tp, worst_of, mtp_checkpoints.CASES, dims, references):
        assert all(difference < BOUND for difference in worst.values()), worst


def norms_exchanged(state):
    return {**state, "mtp.pre_fc_norm_hidden.weight": state["mtp.pre_fc_norm_embedding.weight"]}


def halves_exchanged(state):
    return {**state, "mtp.fc.weight": state["mtp.fc.weight"].roll(state["mtp.fc.weight"].shape[0], 1)}


@pytest.mark.parametrize("mistake", [norms_exchanged, halves_exchanged])
def test_parity_can_fail(references, mistake):
    (worst,) = pool.run(1, worst_of, ["qwen3_next"], mb.ParallelDims(), references, mistake)
    assert worst["qwen3_next"] > 50 * BOUND
