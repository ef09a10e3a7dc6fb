"""Conversion tasks, by the calls of SkyRL and miles: buckets of tasks, and tasks with other tensors."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor, nn

import mcore_bridge as mb
from mcore_bridge import ParallelDims
from mcore_bridge.errors import BridgeError
from mcore_bridge.rules.names import Numbering, global_name
from mcore_bridge.trainers import conversion_tasks, megatron_bridge, miles
from mcore_bridge.trainers.conversion_tasks import SourcedWeight
from mcore_bridge.weights import export
from mcore_bridge.weights.agreement import Only
from tests.support import pool
from tests.support.exports import assert_exact, built
from tests.support.strategies import tiny

MESH = ParallelDims(tp=2, pp=2, ep=2, sp=True)
SPARSE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 22, "mlp_only_layers": [0]}


def bridge_of(kind: Any, models: list[nn.Module]) -> tuple[Any, list[nn.Module]]:
    """A bridge, and models in a wrapper like DDP's."""
    wrapped: list[nn.Module] = []
    for model in models:
        wrapper = nn.Module()
        wrapper.module = model
        wrapped.append(wrapper)
    return kind("unused"), wrapped


def on_all(values: Any) -> list[Any]:
    """The values of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, values)
    return found


def in_buckets(bridge: Any, models: list[nn.Module], limit: int) -> Iterator[tuple[str, Tensor]]:
    """Export like SkyRL: sizes from the first tasks, buckets of their numbers, then new tasks for each export."""
    tasks = bridge.get_conversion_tasks(models)
    own = [
        task.param_weight.nbytes * task.mapping.tp_size * (task.mapping.ep_size if task.mapping.is_expert else 1)
        if task.param_weight is not None
        else None
        for task in tasks
    ]
    sizes = [next(size for size in of_ranks if size is not None) for of_ranks in zip(*on_all(own), strict=True)]
    groups: dict[Any, list[int]] = {}
    for number, task in enumerate(tasks):
        key = getattr(task.mapping, "group_key", None) if getattr(task.mapping, "is_grouped_export", False) else None
        groups.setdefault(key, []).append(number)
    buckets: list[list[int]] = [[]]
    for key, numbers in groups.items():
        for part in [numbers] if key else [[number] for number in numbers]:
            if sum(sizes[each] for each in [*buckets[-1], *part]) > limit:
                buckets.append([])  # SkyRL begins with an empty bucket if the first tensor is too large for one
            buckets[-1] += part
    new = bridge.get_conversion_tasks(models)
    assert len(buckets) > 4
    assert buckets[0] == []
    for bucket in buckets:
        yield from bridge.export_hf_weights(
            models, show_progress=False, conversion_tasks=[new[number] for number in bucket]
        )


class Replacing:
    """The tasks of miles: each with the tensor of a backup, made one by one, and no list."""

    def __init__(self, tasks: Any, backup: dict[str, Tensor]) -> None:
        self.tasks, self.backup = tasks, backup

    def __len__(self) -> int:
        return len(self.tasks)

    def __iter__(self) -> Iterator[Any]:
        for task in self.tasks:
            if task is None or task.param_weight is None:
                yield task
            else:
                weight = self.backup[f"vp_stages.{task.vp_stage}.{task.param_name}"]
                yield dataclasses.replace(task, param_weight=weight)


def numbers_of(name: str) -> list[str]:
    """The numbers of the layer and of the expert in a name of HF or of megatron-core."""
    return re.findall(r"\d+", re.sub(r"linear_fc\d|layernorm\d?", "", name))


def served(dims: ParallelDims, fields: dict[str, Any], expert_format: str) -> dict[str, Any]:
    """Runs in a worker: everything that SkyRL and miles ask of tasks, on one mesh."""
    with_experts = "num_experts" in fields
    models, state = built(dims, tiny("qwen3_moe" if with_experts else "qwen3", vocab_size=97, **fields))
    if expert_format == "fused":
        for model in models:
            model.bridge = dataclasses.replace(model.bridge, expert_format="fused")
    truth = mb.to_hf_state_dict(models)
    assert (expert_format == "fused") == (truth.keys() != state.keys())
    bridge, wrapped = bridge_of(megatron_bridge.AutoBridge, models)
    tasks = bridge.get_conversion_tasks(wrapped)
    described = [(each.mapping.is_expert, each.pp_rank, each.hf, each.shape, each.group) for each in tasks]
    assert len({repr(each) for each in on_all(described)}) == 1, "ranks have other tasks"
    assert {name for each in tasks for name in each.hf_names} == truth.keys()
    for each in tasks:
        assert all(truth[spec.name].shape == spec.shape for spec in each.hf)
        assert (each.group in truth) == (each.mapping.is_grouped_export)
        if each.param_weight is None:
            assert each.vp_stage is None
            assert each.megatron_module is None
            assert each.pp_rank != models[0].pg_collection.pp.rank()
            continue
        chunk: Any = models[each.vp_stage]
        assert {**dict(chunk.named_parameters()), **dict(chunk.named_buffers())}[each.param_name] is each.param_weight
        assert getattr(each.megatron_module, each.param_name.rpartition(".")[2]) is each.param_weight
        assert each.num_bytes == each.param_weight.nbytes
        assert each.shape == each.param_weight.shape
    held = [each.global_param_name for each in tasks if each.param_weight is not None]
    every = {name for of_rank in on_all(held) for name in of_rank}
    assert every == {*tasks.names.values()}
    assert len(tasks[0].names) == len(every)
    assert_exact(dict(in_buckets(bridge, wrapped, 1 << 14)), truth)
    # -- miles
    backup = {}
    for stage, model in enumerate(models):
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            backup[f"vp_stages.{stage}.{name}"] = tensor.detach().clone()
            tensor.data.zero_()
    theirs, wrapped = bridge_of(miles.AutoBridge, models)
    options = {"cpu": False, "merge_adapter_weights": False}
    triples = [*theirs.export_hf_weights(wrapped, conversion_tasks=Replacing(tasks, backup), **options)]
    assert_exact({name: tensor for name, tensor, _ in triples}, truth)
    for name, _, megatron in triples:
        if expert_format == "split":
            assert numbers_of(name) == numbers_of(megatron), f"{name} is not of {megatron}"
    whole = {name: tensor for name, tensor, _ in theirs.export_hf_weights(wrapped)}
    assert not any(tensor.any() for tensor in whole.values()), "the models themselves were not exported"
    # -- everything else
    for each in tasks:  # tasks that are kept follow parameters that a trainer replaces
        if each.param_weight is not None:
            setattr(
                each.megatron_module,
                each.param_name.rpartition(".")[2],
                nn.Parameter(backup[f"vp_stages.{each.vp_stage}.{each.param_name}"]),
            )
    assert_exact(dict(bridge.export_hf_weights(wrapped, conversion_tasks=[*tasks])), truth)
    sourced: list[SourcedWeight] = [
        *bridge.export_hf_weights(wrapped, conversion_tasks=tasks, with_megatron_names=True)
    ]
    assert {each.param_name: each.megatron_param_name for each in sourced if len(each.megatron_param_names) == 1} == {
        name: megatron for name, _, megatron in triples if name not in {each.group for each in tasks}
    }
    return {"problems": refused(bridge, wrapped, tasks), "sources": {each[0]: each[2] for each in sourced}}


def refused(bridge: Any, models: list[nn.Module], tasks: Any) -> dict[str, str]:
    """Runs in a worker: the errors of wrong tasks."""
    first = int(dist.get_rank() == 0)
    alone = next((number for number, task in enumerate(tasks) if task.group), 0)
    whole = next(each for each in tasks if each.pp_rank == 0 and not each.is_expert)
    cut = None if whole.param_weight is None else whole.param_weight[:1]
    cases: dict[str, Any] = {
        "another shape": [dataclasses.replace(whole, param_weight=cut)],
        "other tasks": [tasks[first]],
        "a part of a group": [tasks[alone]],
        "other types": [object()],
    }
    found = {}
    for name, chosen in cases.items():
        try:
            list(bridge.export_hf_weights(models, conversion_tasks=chosen))
        except BridgeError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.parametrize(
    ("dims", "fields", "expert_format"),
    [
        (MESH, SPARSE, "split"),
        (ParallelDims(pp=2, vp=2, ep=1, tp=2, sp=True), {"tie_word_embeddings": True}, "split"),
        (ParallelDims(tp=2, ep=2, sp=True), SPARSE, "fused"),
    ],
    ids=["TP2 PP2 EP2", "TP2 PP2 VP2, tied", "EP2, one tensor for all experts"],
)
def test_buckets_and_backups(dims, fields, expert_format):
    ranks = pool.run(dims.tp * dims.pp, served, dims, fields, expert_format)
    for rank in ranks:
        problems = rank["problems"]
        assert "ExportError" in problems["other tasks"]
        assert "conversion_tasks" in problems["other tasks"]
        assert "ConfigError: conversion_tasks must come from get_conversion_tasks" in problems["other types"]
        assert re.search(r"param_weight must be a shard \(.*\) of .*, found \(1,", problems["another shape"])
        assert ("a part of a group" in problems) == (expert_format == "fused")
        assert "group_key" in problems.get("a part of a group", "group_key")
        assert rank["sources"] == ranks[0]["sources"]


MISTAKES = {
    "local numbers for global ones": (conversion_tasks, "global_name", lambda name, numbering: name),
    "the tensors of the models in place of a backup": (export, "Only", lambda tensors: Only()),
    "a task for each expert of all ranks": (conversion_tasks, "kind_of", lambda name: name),
}


def mistaken(mistake: str, *args: Any) -> str:
    """Runs in a worker: what the checks above say of a mistake."""
    home, name, wrong = MISTAKES[mistake]
    with mock.patch.object(home, name, wrong):
        try:
            served(*args)
        except (AssertionError, BridgeError) as error:
            return f"found: {error}"
    return "not found"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake):
    found = pool.run(2, mistaken, mistake, ParallelDims(tp=2, ep=2, sp=True), SPARSE, "split")
    assert all(each.startswith("found") for each in found), found


def test_global_names_are_like_those_of_megatron_bridge():
    numbering = Numbering(layers=(4, 6), experts=(8, 9), mtp=(1,))
    for local, name in [
        ("decoder.layers.1.mlp.linear_fc1.layer_norm_weight", "decoder.layers.6.mlp.linear_fc1.layer_norm_weight"),
        ("decoder.layers.0.mlp.experts.linear_fc1.weight1", "decoder.layers.4.mlp.experts.linear_fc1.weight9"),
        ("mtp.layers.0.mtp_model_layer.mlp.router.weight", "mtp.layers.1.mtp_model_layer.mlp.router.weight"),
        ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
    ]:
        assert global_name(local, numbering) == name
    sequential = "decoder.layers.{}.mlp.experts.local_experts.{}.linear_fc2.bias"
    assert global_name(sequential.format(0, 0), numbering) == sequential.format(4, 8)


def with_adapters(dims: ParallelDims) -> None:
    """Runs in a worker: the tasks are those of the base, and an export merges adapters or leaves them out."""
    models, _ = built(dims, tiny("qwen3", vocab_size=97))
    mb.add_adapters(models, rank=2, alpha=4, targets=["q_proj", "down_proj"])
    for name, parameter in (named for model in models for named in model.named_parameters()):
        if "adapter" in name:
            parameter.data.fill_(0.1)
    bridge, wrapped = bridge_of(megatron_bridge.AutoBridge, models)
    list(bridge.export_adapter_weights(wrapped))
    tasks = bridge.get_conversion_tasks(wrapped)
    assert not any("adapter" in task.global_param_name for task in tasks)
    exported = []
    for merged in (True, False):
        options = {"merge_adapter_weights": merged}
        parts = [dict(bridge.export_hf_weights(wrapped, conversion_tasks=tasks[at::2], **options)) for at in (0, 1)]
        exported.append(mb.to_hf_state_dict(models, merged=merged))
        assert_exact(parts[0] | parts[1], exported[-1])
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not exported[0][name].equal(exported[1][name])


def test_models_with_adapters():
    pool.run(2, with_adapters, ParallelDims(pp=2))
