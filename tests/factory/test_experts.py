"""Experts: every mix of TP, EP and ETP, both naming schemes, and routers bit by bit."""

import itertools
import math

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from mcore_bridge.errors import BridgeError, CheckpointError, ExportError
from mcore_bridge.weights.agreement import agree_on_plan
from mcore_bridge.weights.files.hf_folder import Checkpoint
from mcore_bridge.weights.load import load_hf_weights
from mcore_bridge.weights.plan.stream import HEADER
from tests.support import fake_mesh, pool, stepping
from tests.support.experts import HF, KINDS, fused
from tests.support.strategies import random_state, save, tiny

MESHES = [
    ParallelDims(tp=tp, ep=ep, etp=etp, sp=tp > 1)
    for tp, ep, etp in itertools.product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4))
    if math.lcm(tp, ep * etp) <= 8
]


def expected(state, expert, etp, etp_rank):
    """fc1 and fc2 of one expert on one rank, sliced in the test."""
    gate, up, down = (state[f"model.layers.1.mlp.experts.{expert}.{kind}.weight"] for kind in KINDS)
    return torch.cat((gate.chunk(etp)[etp_rank], up.chunk(etp)[etp_rank])), down.chunk(etp, dim=1)[etp_rank]


def export_in_shifts(dims):
    """The number of ranks that send with each message, if more experts are exported than may be incomplete at once."""
    hf = tiny("qwen3_moe", num_hidden_layers=2, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=64)
    state = random_state(hf)
    dims.initialize(device="cpu")
    models = mb.build_model(hf, dims=dims, dtype=torch.float32, device="cpu", load_weights=state)
    plan = agree_on_plan(models, None, "lm", bucket_bytes=1 << 12).program.plan
    exported = mb.to_hf_state_dict(models, bucket_bytes=1 << 12)
    assert exported.keys() == state.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in state.items())
    stepping.leave_mesh()
    return [sum(width > HEADER for width in message.widths) for message in plan.messages]


def test_experts_that_go_in_shifts_arrive_as_they_were():
    (senders, *others) = pool.run(8, export_in_shifts, ParallelDims(ep=8))
    assert all(each == senders for each in others)
    assert 1 < min(set(senders) - {1}) < 8


@pytest.mark.parametrize("dims", MESHES, ids=str)
def test_every_rank_holds_its_experts_and_gives_them_back(dims):
    state = random_state(HF)
    stacked = fused(state)
    held = fake_mesh.build_everywhere(HF, dims, lambda chunks: load_hf_weights(chunks, state), dtype=torch.float32)
    again = fake_mesh.build_everywhere(
        HF, dims, lambda chunks: load_hf_weights(chunks, stacked), expert_format="fused", dtype=torch.float32
    )
    for (bound, _), (same, _) in zip(held, again, strict=True):
        names = {name for name in bound.tensors if ".experts." in name}
        assert len(names) == 2 * 8 // dims.ep
        for name in names:
            expert = int(name.split(".experts.")[1].split(".")[0])
            fc1, fc2 = expected(state, expert, dims.etp, bound.ranks["etp"])
            assert torch.equal(bound.tensors[name], fc1 if "fc1" in name else fc2), name
        assert all(torch.equal(same.tensors[name], tensor) for name, tensor in bound.tensors.items())
    for ranks, given in ((held, state), (again, stacked)):
        exported = fake_mesh.export(ranks, bucket_bytes=1 << 12)
        assert exported.keys() == given.keys()
        assert all(torch.equal(exported[name], tensor) for name, tensor in given.items())


def test_nothing_is_read_from_the_attributes_of_megatron():
    """megatron-core does not set them on experts, or sets wrong ones, so they must have no effect."""
    state = random_state(HF)

    def load(chunks):
        for parameter in chunks[0].parameters():
            for name in ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce"):
                if hasattr(parameter, name):
                    delattr(parameter, name)
        load_hf_weights(chunks, state)

    held = fake_mesh.build_everywhere(HF, ParallelDims(tp=2, ep=2, etp=2, sp=True), load, dtype=torch.float32)
    exported = fake_mesh.export(held)
    assert all(torch.equal(exported[name], state[name]) for name in state)


def exported_formats(folder, sizes):
    """Runs in each worker."""
    dims = ParallelDims(**sizes)
    with stepping.mesh(dims):
        models = mb.build_model(folder, dims=dims, dtype=torch.float32, device="cpu")
        states = [
            mb.to_hf_state_dict(models, expert_format=expert_format) for expert_format in (None, "split", "fused")
        ]
        names = [spec.name for spec in mb.manifest(models, expert_format="fused")]
        mb.save_hf_checkpoint(models, f"{folder}-saved")
        return states, names, list(states[2])


@pytest.mark.parametrize("sizes", [{"ep": 2}, {"tp": 2, "sp": True}, {"pp": 2}, {"etp": 2}], ids=str)
@pytest.mark.parametrize("expert_format", ["split", "fused"])
def test_names_are_those_of_the_checkpoint_or_those_asked_for(tmp_path, expert_format, sizes):
    split = random_state(HF)
    stacked = fused(split)
    own = {"split": split, "fused": stacked}[expert_format]
    save(own, HF, tmp_path)
    for states, names, order in pool.run(2, exported_formats, str(tmp_path), sizes):
        for found, wanted in zip(states, (own, split, stacked), strict=True):
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert names == order
    assert Checkpoint(f"{tmp_path}-saved").keys() == own.keys()


def test_an_iterable_is_read_in_the_format_that_is_said():
    state = fused(random_state(HF))
    held = fake_mesh.build_everywhere(
        HF,
        ParallelDims(ep=2),
        lambda chunks: load_hf_weights(chunks, iter(state.items()), expert_format="fused"),
        dtype=torch.float32,
    )
    assert fake_mesh.export(held).keys() == random_state(HF).keys()
    with pytest.raises(CheckpointError, match="missing"):
        fake_mesh.build_everywhere(
            HF, ParallelDims(), lambda chunks: load_hf_weights(chunks, iter(state.items())), dtype=torch.float32
        )


def test_a_stack_of_too_few_experts_is_refused():
    state = fused(random_state(HF))
    name = "model.layers.1.mlp.experts.down_proj"
    with pytest.raises(CheckpointError, match=rf"{name} has shape \(7, .*takes \(8, "):
        fake_mesh.build_everywhere(
            HF,
            ParallelDims(ep=2),
            lambda chunks: load_hf_weights(chunks, {**state, name: state[name][:7]}),
            dtype=torch.float32,
        )


def test_a_missing_expert_is_named():
    state = random_state(HF)
    state.pop("model.layers.1.mlp.experts.7.up_proj.weight")
    with pytest.raises(CheckpointError, match=r"1 tensor missing \['model.layers.1.mlp.experts.7.up_proj.weight'\]"):
        fake_mesh.build_everywhere(
            HF, ParallelDims(ep=4), lambda chunks: load_hf_weights(chunks, state), dtype=torch.float32
        )


def test_an_expert_too_many_is_unexpected_on_every_rank():
    state = random_state(HF)
    state["model.layers.1.mlp.experts.8.up_proj.weight"] = state["model.layers.1.mlp.experts.0.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"unexpected \['model.layers.1.mlp.experts.8.up_proj.weight'\]"):
        fake_mesh.build_everywhere(
            HF, ParallelDims(ep=4), lambda chunks: load_hf_weights(chunks, state), dtype=torch.float32
        )


def different_formats():
    """Run in each worker: each rank requests a different expert."""
    dims = ParallelDims(ep=2)
    with stepping.mesh(dims):
        models = mb.build_model(HF, dims=dims, dtype=torch.float32, device="cpu", load_weights=random_state(HF))
        rank = torch.distributed.get_rank()
        try:
            mb.to_hf_state_dict(models, expert_format=("split", "fused")[rank])
        except BridgeError as error:
            return type(error), str(error)


def test_ranks_that_ask_for_different_formats_all_raise():
    for kind, message in pool.run(2, different_formats):
        assert kind is ExportError
        assert "expected the same expert_format on every rank" in message


SIGMOID = tiny("glm4_moe", n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=0)


def cast(state):
    """Runs in each worker: a bf16 model of an fp32 checkpoint."""
    with stepping.mesh(ParallelDims(ep=2)):
        models = mb.build_model(SIGMOID, dims=ParallelDims(ep=2), device="cpu", load_weights=state)
        return mb.to_hf_state_dict(models)


def test_what_selects_experts_keeps_its_bits_whatever_the_dtype_of_the_model():
    state = random_state(SIGMOID)
    for exported in pool.run(2, cast, state):
        for name, tensor in exported.items():
            kept = name.endswith("e_score_correction_bias")
            assert tensor.dtype == (torch.float32 if kept else torch.bfloat16)
            assert torch.equal(tensor, state[name] if kept else state[name].bfloat16()), name
