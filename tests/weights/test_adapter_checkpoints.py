"""Checkpoints of megatron-core with adapters: alone or with the base, and training that goes on from them elsewhere."""

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from mcore_bridge.errors import CheckpointError
from mcore_bridge.factory.adapters import add_adapters
from mcore_bridge.weights.adapters import iter_hf_adapters
from mcore_bridge.weights.dist_checkpoint.folder import TorchDistFolder
from tests.support import pool, stepping
from tests.support.strategies import random_state, save, tiny

MOE = {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
HF = tiny("qwen3_moe", vocab_size=97, mlp_only_layers=[0], **MOE)
TARGETS = ("q_proj", "v_proj", "linear_proj", "linear_fc1", "linear_fc2")
HERE = {"tp": 2, "sp": True, "etp": 2}
THERE = ({"pp": 2}, {"ep": 2}, {"tp": 2, "sp": True, "etp": 1, "ep": 2}, {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hf")
    save(random_state(HF), HF, path)
    return path


def build(folder, dims, *, alpha=3, targets=TARGETS, **arguments):
    chunks = mb.build_model(folder, dims=dims, device="cpu", dtype=torch.float32, **arguments)
    add_adapters(chunks, rank=2, alpha=alpha, targets=targets, seed=dims.pp)
    return chunks


def optimized(chunks, dims):
    """The chunks in megatron-core's DDP, its distributed optimizer, and what takes a step and gives its loss."""
    wrapped = stepping.wrap(chunks, use_distributed_optimizer=True)
    optimizer = stepping.distributed_optimizer(wrapped, lr=1e-2)
    batch = torch.randint(0, 97, (4, 17), generator=torch.Generator().manual_seed(0))

    def step():
        for ddp in wrapped:
            ddp.zero_grad_buffer()
        optimizer.zero_grad()
        loss = stepping.forward_backward(wrapped, dims, batch)
        assert not optimizer.prepare_grads()
        assert optimizer.step_with_ready_grads()  # step() takes a norm of gradients on CUDA between the two
        return None if loss is None else loss.item()

    return wrapped, optimizer, step


def adapters(models):
    return {name: tensor.clone() for name, tensor in iter_hf_adapters(models)}


def go_on(folder, target):
    """Losses and adapters of a run behind a save, and of those that go on from it on other meshes."""
    dims = ParallelDims(**HERE)
    with stepping.mesh(dims):
        models, optimizer, step = optimized(build(folder, dims), dims)
        start = adapters(models)
        steps = [step(), step()]
        saved = adapters(models)
        assert all(not torch.equal(saved[name], tensor) for name, tensor in start.items())
        mb.save_checkpoint(models, target / "all", optimizer=optimizer)
        mb.save_checkpoint(models, target / "alone", optimizer=optimizer, part="adapters")
        steps += [step(), step()]
        results = [(steps, saved, adapters(models))]
    for number, sizes in enumerate(THERE):
        dims = ParallelDims(**sizes)
        with stepping.mesh(dims):
            chunks = build(folder, dims, load_weights=False)
            alone = number % 2 == 0
            models, optimizer, step = optimized(chunks, dims)
            if alone:  # the base comes from HF, into models that are wrapped
                before = adapters(models)
                mb.load_hf_weights(models, folder)
                assert all(torch.equal(before[name], tensor) for name, tensor in adapters(models).items())
            part = "adapters" if alone else "everything"
            report = mb.load_checkpoint(models, target / ("alone" if alone else "all"), optimizer=optimizer, part=part)
            assert (report.missing, report.unexpected) == ((), ())
            read = adapters(models)
            results.append(([step(), step()], read, adapters(models)))
            base = mb.to_hf_state_dict(chunks, merged=False)
            assert all(torch.equal(base[name], tensor) for name, tensor in random_state(HF).items()), sizes
    return results


def test_training_goes_on_at_another_mesh(folder, tmp_path):
    ranks = pool.run(2, go_on, folder, tmp_path)
    (losses, saved, end), *others = (ranks[0][number] for number in range(1 + len(THERE)))
    assert losses[3] < losses[2] < losses[1]
    for number, (sizes, (_, read, after)) in enumerate(zip(THERE, others, strict=True), 1):
        found = next(rank[number][0] for rank in reversed(ranks))  # the last rank is of the last stage
        assert found == pytest.approx(losses[2:], rel=1e-5), sizes
        assert read.keys() == saved.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in saved.items()), sizes
        for name, tensor in end.items():
            torch.testing.assert_close(after[name], tensor, rtol=1e-3, atol=1e-4, msg=f"{name} on {sizes}")
    keys = TorchDistFolder.open(tmp_path / "alone").metadata.state_dict_metadata
    assert any(key.startswith("optimizer.state.exp_avg.decoder.") for key in keys)
    assert all(".adapter.linear_" in key for key in keys if "decoder." in key), keys


def refusals(folder, target):
    """Runs in each worker: what does not fit is named, and what is asked for is done."""
    dims = ParallelDims(tp=2)
    with stepping.mesh(dims):
        models = build(folder, dims)
        plain = mb.build_model(folder, dims=dims, device="cpu", dtype=torch.float32, load_weights=False)
        mb.save_checkpoint(models, target / "all")
        mb.save_checkpoint(models, target / "base", part="base")
        mb.save_checkpoint(models, target / "alone", part="adapters")
        louder = build(folder, dims, alpha=4)
        others = build(folder, dims, targets=("q_proj", "k_proj", *TARGETS[2:]))
        reads = 'part="base" or part="adapters" reads'
        for loaded, name, part, match in (
            (plain, "all", "everything", f"unexpected .*adapter.linear_in.*{reads}"),
            (models, "base", "everything", "missing .*adapter.linear_in"),
            (models, "alone", "everything", f"missing .*decoder.final_layernorm.weight.*{reads}"),
            (models, "base", "adapters", "missing .*adapter.linear_in"),
            (plain, "alone", "adapters", "needs a model with adapters, found none"),
            (plain, "all", "lora", r"part must be one of \['everything', 'base', 'adapters'\], found 'lora'"),
            (louder, "all", "everything", "other adapters than the model: alpha 3.0 there and 4.0 here"),
            (
                others,
                "alone",
                "adapters",
                r"linear_qkv.adapter.linear_in.weight \[.*v_proj.*there and \[.*k_proj.* here",
            ),
        ):
            with pytest.raises(CheckpointError, match=match):
                mb.load_checkpoint(loaded, target / name, part=part)
        for name in ("all", "base"):
            for loaded in (plain, models):
                assert not mb.load_checkpoint(loaded, target / name, part="base").unexpected
        with pytest.raises(CheckpointError, match=r"of which .*adapter.linear_in.weight is not in part='base'"):
            mb.save_checkpoint(models, target / "base", part="base", optimizer=object())
        base = mb.to_hf_state_dict(plain)
        assert all(torch.equal(base[name], tensor) for name, tensor in random_state(HF).items())


def test_what_does_not_fit_is_named_or_left_out_on_request(folder, tmp_path):
    pool.run(2, refusals, folder, tmp_path)
