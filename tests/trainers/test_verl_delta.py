"""Deltas for verl's ``delta_sharded``, on the interface of verl 0.9.1; ``test_verl.py`` has the test with verl."""

import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from mcore_bridge import ParallelDims
from mcore_bridge.weights.plan import positions
from tests import zoo
from tests.support import mtp_checkpoints, pool, verl_site
from tests.support.strategies import tiny
from tests.workers import verl_delta

SPARSE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 22, "mlp_only_layers": [0]}
GROUPED = {"vocab_size": 97, "num_key_value_heads": 2, "tie_word_embeddings": True}
Made = Callable[[], Any]
CASES: dict[str, tuple[int, ParallelDims, Made, dict[str, Any]]] = {
    "TP2 PP2 EP2": (4, ParallelDims(tp=2, pp=2, ep=2, sp=True), lambda: tiny("qwen3_moe", **SPARSE), {}),
    "TP4, two groups of heads": (4, ParallelDims(tp=4, sp=True), lambda: tiny("qwen3", **GROUPED), {}),
    "TP2 DP2": (4, ParallelDims(tp=2, sp=True), lambda: tiny("qwen3", **GROUPED), {}),
    "EP2 DP2": (4, ParallelDims(ep=2), lambda: tiny("qwen3_moe", **SPARSE), {}),
    "EP2, turned and fused experts": (2, ParallelDims(ep=2), lambda: zoo.cases()["gpt_oss"].hf, {}),
    "PP2, an embedding in both stages": (
        2,
        ParallelDims(pp=2),
        lambda: mtp_checkpoints.config("deepseek_v3"),
        {"overrides": {"mtp_num_layers": 1}},
    ),
}


def run(name: str, site: str, mistake: str | None = None) -> list[Any]:
    world_size, dims, make, arguments = CASES[name]
    return pool.run(world_size, in_site, site, mistake, dims, make(), arguments)


def in_site(site: str, mistake: str | None, *args: Any) -> Any:
    """Runs in a worker, with the interface of verl."""
    with verl_site.on_path(site):
        if mistake is None:
            return verl_delta.life(*args)
        with planted(mistake):
            return verl_delta.life(*args)["problems"]


def planted(mistake: str) -> Any:
    """A mistake in this process."""
    delta_export: Any = importlib.import_module("mcore_bridge.trainers.verl.delta_export")
    right = delta_export.ShardRecord
    home, name, wrong = {
        "replicas": (positions, "_copies", lambda trace: trace.to_mcore),
        "slots": (delta_export, "ShardRecord", lambda *a: right(*a[:3], a[3][::-1], *a[4:])),
        "stacks": (positions, "unstacked", lambda name: (name.partition("[")[0], None)),
        "order": (positions, "_strides_in_shard", lambda copy, shape: positions._strides(shape)),
        "owner": (delta_export, "_owns", lambda task, stage: task.param_weight is not None),
    }[mistake]
    return mock.patch.object(home, name, wrong)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return verl_site.write(tmp_path_factory.mktemp("verl"))


@pytest.mark.parametrize("name", CASES)
def test_deltas_are_a_full_sync(name, site):
    ranks = run(name, site)
    assert [rank["problems"] for rank in ranks] == [[]] * len(ranks)
    few, most, none = ranks[0]["counts"]
    numel = ranks[0]["numel"]
    assert 0.005 * numel < few < 0.02 * numel
    assert 0.75 * numel < most <= numel  # layers for multi-token prediction do not change
    assert none == 0


MISTAKES = {
    "replicas": "TP4, two groups of heads",
    "slots": "TP2 DP2",
    "stacks": "EP2, turned and fused experts",
    "order": "EP2, turned and fused experts",
    "owner": "PP2, an embedding in both stages",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake, site):
    assert any(run(MISTAKES[mistake], site, mistake))
