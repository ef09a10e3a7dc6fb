"""Checkpoints of megatron-core with adapters: alone or with the base, and training that continues from them."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from safetensors.torch import load_file
from torch.nn.init import zeros_

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from mcore_bridge.errors import CheckpointError
from mcore_bridge.factory.add_adapters import add_adapters
from mcore_bridge.rules.adapters import base_name, is_adapter
from mcore_bridge.trainers.peft_functions import create_peft, load_peft_adapter_checkpoint
from mcore_bridge.weights.dist_checkpoint.compare import leaves_of
from mcore_bridge.weights.dist_checkpoint.dist_writer import InThisProcess
from mcore_bridge.weights.dist_checkpoint.folder import TorchDistFolder
from mcore_bridge.weights.manifest import digest
from mcore_bridge.weights.model_tensors import held_tensors
from mcore_bridge.weights.peft.hf_adapters import iter_hf_adapters
from tests.support import pool, stepping
from tests.support.peft_models import fill
from tests.support.strategies import random_state, save, tiny

MOE = {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
HF = tiny("qwen3_moe", vocab_size=97, mlp_only_layers=[0], **MOE)
TARGETS = ("q_proj", "v_proj", "linear_proj", "linear_fc1", "linear_fc2")
HERE = {"tp": 2, "sp": True, "etp": 2}
RANK = 4
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
    batch = torch.randint(0, 97, (4, 17), generator=torch.Generator().manual_seed(0))
    return stepping.optimized(chunks, dims, batch)


def adapters(models):
    """All adapters, which the caller may keep: no tensor is a view of received memory."""
    kept = dict(iter_hf_adapters(models))
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in kept.values())
    return kept


def each_has_its_own_keys(chunk):
    """Megatron-core can also number the experts in keys, and then reads and writes them one by one."""
    metadata = {"singleton_local_shards": True, "dp_cp_group": chunk.pg_collection.dp_cp}
    factor = "linear_fc1.adapter.linear_out.weight"
    entry = chunk.sharded_state_dict(metadata=metadata)[f"decoder.layers.1.mlp.experts.{factor}"]
    own, moved = leaves_of(entry), entry.key.replace("layers.1", "layers.2")
    leaves = leaves_of(replace(entry, key=f"optimizer.{moved}"))
    keys = [leaf.key.removesuffix("_w").removesuffix("_v") for leaf in own]
    experts = [f"decoder.layers.1.mlp.experts.experts.{number}.{factor}" for number in range(4)]
    assert keys == [key for key in experts for _ in ("gate", "up")], keys
    assert [leaf.key.replace("layers.2", "layers.1") for leaf in leaves] == [f"optimizer.{leaf.key}" for leaf in own]
    assert torch.equal(entry.merge_fn([leaf.data for leaf in own]), entry.data)


def go_on(folder, target):
    """Losses and adapters of a run after a save, and of runs that continue from the save on other meshes."""
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
        each_has_its_own_keys(models[0].module)
    with stepping.mesh(dims):
        (chunk,) = build(folder, dims)
        models, optimizer, _ = optimized([chunk.requires_grad_()], dims)
        lacks = r"lacks \d+ states of this optimizer, such as optimizer\.state\.exp_avg\..*: freeze what it had frozen"
        with pytest.raises(CheckpointError, match=lacks):
            mb.load_checkpoint(models, target / "all", optimizer=optimizer)
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


def by_names_of_more_modules(folder):
    """Adapters that a run has named with more modules than its model has load into those of its folder."""
    with stepping.mesh(ParallelDims()):
        models = build(folder, ParallelDims(), targets=("gate_proj", "up_proj", "down_proj"))
        mb.save_hf_adapters(models, folder / "adapters")
        mb.save_checkpoint(models, folder / "alone", part="adapters")
        again = mb.build_model(folder, device="cpu", dtype=torch.float32)
        mb.add_adapters(again, folder / "adapters")
        written = adapters(again)
        for name, tensor in held_tensors(again).items():
            tensor.data.mul_(0 if is_adapter(name) else 1)
        report = mb.load_checkpoint(again, folder / "alone", part="adapters")
        read = adapters(again)
        assert all(torch.equal(read[name], tensor) for name, tensor in written.items())
        return report.missing, report.unexpected


def test_modules_that_a_model_lacks_do_not_count(tmp_path):
    hf = tiny("qwen3_moe", vocab_size=97, mlp_only_layers=[], **MOE)
    save(random_state(hf), hf, tmp_path)
    assert pool.run(1, by_names_of_more_modules, tmp_path) == [((), ())]


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
    for prefix in ("", "optimizer.state.exp_avg."):  # a parameter holds all experts, and the folder has one by one
        stored = keys[f"{prefix}decoder.layers.1.mlp.experts.experts.linear_fc1.adapter.linear_out.weight"]
        assert (stored.size, {chunk.sizes for chunk in stored.chunks}) == ((4, 80, 2), {(1, 20, 2)})
    assert any(key.startswith("optimizer.state.exp_avg.decoder.") for key in keys)
    assert all(".adapter.linear_" in key for key in keys if "decoder." in key), keys


SETS = {
    "default": {"rank": 2, "alpha": 3, "targets": TARGETS},
    "other": {"rank": 3, "alpha": 5, "targets": ("k_proj", "v_proj", "o_proj"), "seed": 1, "dora": True},
}


def results_of(models, optimizer, step, folder):
    """What two runs must have in common after a step: the loss, adapters, merged weights, and files."""
    loss, name = step(), models[0].module.bridge_adapter_sets.in_use
    mb.save_hf_adapters(models, folder / name)
    mb.save_checkpoint(models, folder / name / "checkpoint", optimizer=optimizer, part="adapters")
    tensors = adapters(models)
    return loss, tensors, {name: digest(tensor) for name, tensor in mb.iter_hf_weights(models, merged=True)}


def in_turn(folder, target):
    """Runs in each worker: two sets of adapters that are trained apart, and on one base, one after the other."""
    dims, apart, together, runs = ParallelDims(**HERE), {}, {}, {}
    with stepping.mesh(dims):
        (target / "together").mkdir(parents=True, exist_ok=True)
        for name, options in SETS.items():
            chunks = mb.build_model(folder, dims=dims, device="cpu", dtype=torch.float32)
            add_adapters(chunks, **options, name=name)
            models, optimizer, step = optimized(chunks, dims)
            apart[name] = [step(), *results_of(models, optimizer, step, target), step(), adapters(models)]
        chunks = mb.build_model(folder, dims=dims, device="cpu", dtype=torch.float32)
        base = {name: digest(tensor) for name, tensor in mb.iter_hf_weights(chunks)}
        for name, options in SETS.items():
            add_adapters(chunks, **options, name=name)
            runs[name] = optimized(chunks, dims)
        for name, (*_, step) in runs.items():
            mb.set_adapters(chunks, name)
            together[name] = [step()]
        for name, run in runs.items():
            mb.set_adapters(chunks, name)
            together[name] += results_of(*run, target / "together")
        assert {name: digest(tensor) for name, tensor in mb.iter_hf_weights(chunks, merged=False)} == base
        for name, (models, optimizer, step) in runs.items():  # each set gets back what its own folders have
            mb.set_adapters(chunks, name)
            (other,) = SETS.keys() - {name}
            with pytest.raises(CheckpointError, match="add adapters of that rank"):
                mb.load_adapters(chunks, target / "together" / other)
            for _ in range(2):
                step()
            path = target / "together" / name / "checkpoint"
            mb.load_checkpoint(models, path, optimizer=optimizer, part="adapters")
            assert adapters(chunks).keys() == together[name][2].keys()
            assert all(torch.equal(tensor, together[name][2][own]) for own, tensor in adapters(chunks).items())
            together[name] += [step(), adapters(models)]
    return apart, together


def test_two_sets_on_one_base_are_trained_and_exported_like_two_models(folder, tmp_path):
    for apart, together in pool.run(2, in_turn, folder, tmp_path):
        for name in SETS:
            for number in (0, 1, 3, 4):  # losses, and digests of merged weights
                assert together[name][number] == apart[name][number]
            for number in (2, 5):  # before and after the step that follows a load
                assert together[name][number].keys() == apart[name][number].keys()
                tensors = apart[name][number].items()
                assert all(torch.equal(together[name][number][own], tensor) for own, tensor in tensors)
            files = [load_file(tmp_path / place / name / "adapter_model.safetensors") for place in ("", "together")]
            assert files[0].keys() == files[1].keys()
            assert all(torch.equal(files[0][own], tensor) for own, tensor in files[1].items())
        assert apart["default"][3] != apart["other"][3]


def with_magnitudes(folder, target):
    """Runs in each worker: adapters of DoRA, on all linear layers, before a checkpoint and after it at another mesh."""
    found = []
    for sizes, load in (({"tp": 2, "sp": True}, False), ({"pp": 2}, True)):
        with stepping.mesh(ParallelDims(**sizes)):
            models = mb.build_model(folder, dims=ParallelDims(**sizes), device="cpu", dtype=torch.float32)
            made = add_adapters(models, rank=2, alpha=3, targets="all-linear", dora=True)
            start = adapters(models)
            if load:
                mb.load_checkpoint(models, target, part="adapters")
            else:
                fill(models, made)
                mb.save_checkpoint(models, target, part="adapters")
            found.append((start, adapters(models)))
    return found


def test_magnitudes_are_lengths_of_rows_at_first_and_are_read_at_another_mesh(tmp_path):
    hf = tiny("qwen3", vocab_size=97)
    (tmp_path / "hf").mkdir()
    save(state := random_state(hf), hf, tmp_path / "hf")
    (start, saved), (other_start, read) = pool.run(2, with_magnitudes, tmp_path / "hf", tmp_path / "checkpoint")[0]
    assert len(saved) == 3 * 7 * hf.num_hidden_layers
    assert all(torch.equal(read[name], tensor) for name, tensor in saved.items())
    for name, tensor in saved.items():
        if name.endswith(".lora_magnitude_vector"):
            lengths = state[f"{base_name(name)}.weight"].norm(dim=1)
            for first in (start, other_start):
                torch.testing.assert_close(first[name], lengths, msg=name)
            assert not torch.allclose(tensor, lengths)


def refusals(folder, target):
    """Runs in each worker: faults are named, and requested parts are read."""
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
            mb.save_checkpoint(models, target / "base", part="base", optimizer=mock.Mock())
        base = mb.to_hf_state_dict(plain)
        assert all(torch.equal(base[name], tensor) for name, tensor in random_state(HF).items())


def test_what_does_not_fit_is_named_or_left_out_on_request(folder, tmp_path):
    pool.run(2, refusals, folder, tmp_path)


def theirs(chunk, wholes, *, stacked):
    """The entries of Megatron-Bridge's adapters of type lora, by megatron-core's layers, in which A is cut by its rank.

    Args:
        wholes: gets each tensor without parallelism, by the name of this model.
        stacked: whether the layers are one tensor, as megatron-core has them by default.
    """
    config, tp, state = chunk.config, chunk.pg_collection.tp, {}
    options = {"config": config, "tp_group": tp, "bias": False, "skip_bias_add": True, "init_method": zeros_}
    for number, layer in enumerate(chunk.decoder.layers):
        offsets = ((0, number, config.num_layers),) if stacked else ()
        for path in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"):
            (out, width), is_row = layer.get_submodule(path).weight.shape, path.endswith(("proj", "fc2"))
            out, width = (out, 2 * width) if is_row else (2 * out, width)
            for end, rows, columns in (("linear_in", RANK, width), ("linear_out", out, RANK)):
                name = f"{path}.adapter.{end}.weight"
                whole = torch.randn(rows, columns, generator=torch.Generator().manual_seed(len(wholes)))
                wholes[f"decoder.layers.{number}.{name}"] = whole
                by_columns, is_gated = (
                    is_row and end == "linear_in",
                    name.startswith("mlp.linear_fc1.adapter.linear_out"),
                )
                kind, more = ColumnParallelLinear, {}
                if by_columns:
                    kind, more = RowParallelLinear, {"input_is_parallel": True}
                linear = kind(columns, rows, **options, **more)
                linear.weight.data.copy_(part_of(whole, tp.rank(), dim=1 if by_columns else 0, is_gated=is_gated))
                key = f"decoder.layers.{'' if stacked else f'{number}.'}{name}"
                metadata = {"dp_cp_group": chunk.pg_collection.dp_cp}
                entry = linear.sharded_state_dict(key.removesuffix("weight"), offsets, metadata)[key]
                state[f"{number} {key}"] = apply_swiglu_sharded_factory(entry, offsets) if is_gated else entry
    return state


def part_of(whole, rank, *, dim, is_gated):
    """The part of one of two ranks, cut in each half for gate and up."""
    halves = whole.chunk(2, dim) if is_gated else (whole,)
    return torch.cat([half.chunk(2, dim)[rank] for half in halves], dim)


def from_megatron_bridge(folder, target):
    """Runs in each worker: reads folders with Megatron-Bridge's keys, and refuses them if keys do not fit."""
    dims, lora, rank = ParallelDims(tp=2), {"rank": RANK, "alpha": 3}, dist.get_rank()
    with stepping.mesh(dims):
        (chunk,) = mb.build_model(folder, dims=dims, device="cpu", dtype=torch.float32)
        create_peft(lora)([chunk])
        (other,) = mb.build_model(folder, dims=dims, device="cpu", dtype=torch.float32, load_weights=False)
        create_peft({**lora, "type": "canonical_lora"})([other])
        for stacked in (True, False):
            wholes, path = {}, target / f"stacked {stacked}"
            state = theirs(chunk, wholes, stacked=stacked)
            path.mkdir(exist_ok=True)
            dist.barrier()
            dist_checkpointing.save({"model": state, "checkpoint_version": 3.0}, str(path), InThisProcess())
            found = {name: held for name, held in held_tensors([chunk]).items() if is_adapter(name)}
            with torch.no_grad():
                for parameter in found.values():
                    parameter.zero_()
            load_peft_adapter_checkpoint([chunk], str(path))
            assert found.keys() == wholes.keys()
            for name, whole in wholes.items():
                dim = found[name].partition_dim
                wanted = part_of(whole, rank, dim=dim, is_gated="fc1" in name) if dim >= 0 else whole
                assert torch.equal(found[name], wanted), (stacked, name)
            with pytest.raises(CheckpointError, match=r"linear_qkv.adapter.linear_in.weight"):
                load_peft_adapter_checkpoint([other], str(path))


def test_a_folder_of_megatron_bridge_is_read_where_its_keys_fit(tmp_path):
    hf = tiny("qwen3", vocab_size=97)
    (tmp_path / "hf").mkdir()
    save(random_state(hf), hf, tmp_path / "hf")
    pool.run(2, from_megatron_bridge, tmp_path / "hf", tmp_path)
