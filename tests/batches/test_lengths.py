"""Ropes that depend on the length: transformers gives a row alone the same log-probs, whatever the other rows are."""

import dataclasses
import tempfile
from functools import cache

import megatron.core
import pytest
import torch

import mcore_bridge as mb
from mcore_bridge.errors import BatchError, ConfigError
from tests import zoo
from tests.support import pool, stepping
from tests.support.parity import reference_model
from tests.support.strategies import random_state, tiny
from tests.zoo import rope
from tests.zoo.plain import PHI, longrope

ORIGINAL = 14
"""Longer sequences have other frequencies."""
LENGTHS = (15, 5, 13, 23, 14)
"""Microbatches of two rows have a short and a long row. Context parallelism pads 13 and 14 tokens."""
DYNAMIC = {**rope("dynamic", factor=4.0), "max_position_embeddings": ORIGINAL}
D = mb.ParallelDims
CASES = {
    "phi3": [D(tp=2, sp=True), D(pp=2, cp=2)],
    "dynamic": [D(cp=2)],
    "latent": [D(tp=2, pp=2, sp=True)],  # below, with recompute
    "two ropes": [D(cp=2)],
}
if not megatron.core.__version__.startswith("0.16"):
    CASES["hybrid"] = [D(pp=2)]
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def config_of(name):
    if name == "phi3":
        return tiny("phi3", num_key_value_heads=2, **PHI, **longrope(8, original=ORIGINAL))
    if name == "latent":
        return tiny("deepseek_v3", **{**zoo.cases()["deepseek_v3"].fields, **DYNAMIC})
    if name == "two ropes":
        case = zoo.cases()["gemma3-dynamic"]
        return tiny(case.model_type, **{**case.fields, "max_position_embeddings": ORIGINAL})
    return tiny("llama", num_key_value_heads=2, **DYNAMIC)


def batch():
    """Rows of these lengths, padded on both sides."""
    ids = torch.randint(1, 90, (len(LENGTHS), max(LENGTHS) + 3), generator=torch.Generator().manual_seed(2))
    mask = torch.zeros_like(ids)
    for row, length in enumerate(LENGTHS):
        mask[row, row % 3 : row % 3 + length] = 1
    return ids, mask


@cache
def expected(name):
    """The results of transformers for each row alone, the shortest first: its dynamic rope remembers longer rows."""
    ids, mask = batch()
    with tempfile.TemporaryDirectory() as folder:
        model = reference_model(config_of(name), folder)
    found = torch.zeros(ids.shape)
    for row in sorted(range(len(LENGTHS)), key=LENGTHS.__getitem__):
        own = ids[row, mask[row] == 1][None]
        with torch.no_grad():
            logs = model(own).logits.float().log_softmax(-1)[0, :-1]
        start = int(mask[row].argmax())
        found[row, start + 1 : start + LENGTHS[row]] = logs.gather(-1, own[0, 1:, None])[:, 0]
    return found


def said(name, dims, overrides):
    """Log-probs, packed and in rows, and gradients of the packed ones."""
    hf, found = config_of(name), []
    with stepping.mesh(dims):
        how = {"dims": dims, "dtype": torch.float32, "device": "cpu", "load_weights": random_state(hf)}
        model = "hybrid" if name == "hybrid" else "gpt"
        models = mb.build_model(hf, **how, model=model, overrides=overrides)
        learn = {"loss": lambda out, rows: out.log_probs.square().mean(), "micro_batch_size": 2}
        found.append(mb.forward(models, *batch(), **learn).log_probs)
        gradients = [parameter.grad.clone() for parameter in stepping.trained(models)]
        if overrides:
            with pytest.raises(BatchError, match=r"lengths of rows, .* pass packed=True"):
                mb.forward(models, *batch(), **learn, packed=False)
        found.append(mb.forward(models, *batch(), micro_batch_size=2, packed=False).log_probs)
    return found, gradients


def run(name, dims, overrides):
    """The outputs of the ranks, with the log-probs of transformers; and the gradients of each."""
    wanted, ranks = expected(name), pool.run(dims.smallest_world, said, name, dims, overrides)
    for found, _ in ranks:
        for log_probs, form in zip(found, ("packed", "in rows"), strict=True):
            worst = float((log_probs - wanted).abs().max() / wanted.std())
            assert worst < 3e-5, f"{form}: {worst}"
    return [gradients for _, gradients in ranks]


@pytest.mark.parametrize(
    ("name", "dims"), [(name, dims) for name in CASES for dims in CASES[name] if name != "latent"], ids=str
)
def test_a_row_says_the_same_alone_and_beside_longer_ones(name, dims):
    run(name, dims, {})


def test_layers_that_are_computed_again_know_the_lengths_of_their_microbatch():
    """Latent attention computes the rope again, after the first stage has begun another microbatch."""
    (dims,) = CASES["latent"]
    for own, again in zip(run("latent", dims, {}), run("latent", dims, FULL), strict=True):
        assert all(map(torch.equal, own, again))


def by_trainers():
    """Log-probs of padded rows with their mask, which a trainer gives the model itself."""
    hf = config_of("phi3")
    with stepping.mesh(D()):
        (model,) = mb.build_model(hf, dtype=torch.float32, device="cpu", load_weights=random_state(hf))
        ids, mask = batch()
        packed = mb.pack_sequences(ids, mask)
        rows = mb.pack_sequences(ids, mask, packed=False)
        positions = torch.arange(rows.input_ids.size(1)).expand_as(rows.input_ids)
        counted = dataclasses.replace(rows, position_ids=positions)  # also at padding: only the mask marks it
        calls = {
            "packed": (packed, {"packed_seq_params": packed.packed_seq_params}),
            "places": (rows, {}),
            "mask": (counted, {"attention_mask": rows.places[0] >= 0}),
        }
        with torch.no_grad():
            return {
                name: mb.unpack_sequences(
                    own,
                    mb.log_probs(
                        model(own.input_ids, own.position_ids, **{"attention_mask": None, **options}),
                        own.labels,
                        vocab_size=hf.vocab_size,
                        group=model.pg_collection.tp,
                    )[0][None],
                    following=True,
                )
                for name, (own, options) in calls.items()
            }


def test_a_config_may_choose_the_long_factors_for_every_row():
    """vLLM does this, if texts may be longer than the original length."""
    hf = config_of("phi3")
    long = mb.to_transformer_config(hf).hf_rope.frequencies(ORIGINAL + 1)
    scaling = hf.rope_parameters if zoo.NEWEST else hf.rope_scaling
    assert not torch.equal(mb.to_transformer_config(hf).hf_rope.frequencies(ORIGINAL), long)
    scaling["short_factor"] = scaling["long_factor"]
    assert torch.equal(mb.to_transformer_config(hf).hf_rope.frequencies(ORIGINAL), long)


def test_trainers_get_the_same_of_what_they_pass():
    (found,) = pool.run(1, by_trainers)
    for name, log_probs in found.items():
        assert float((log_probs - expected("phi3")).abs().max() / expected("phi3").std()) < 3e-5, name


def test_a_kernel_with_one_set_of_frequencies_is_refused():
    for name in ("phi3", "latent"):
        with pytest.raises(ConfigError, match=r"apply_rope_fusion must be False .* length of each sequence"):
            mb.to_transformer_config(config_of(name), overrides={"apply_rope_fusion": True})
