"""RLinf's actor and engine worker use the library. RLinf must be installed, as in docs/trainers/rlinf.md."""

import ast
import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge import EngineRank, ParallelDims
from tests.support import pool
from tests.support.rlinf_models import CAPACITY, LATENT, SPARSE, TIED, changed, negative
from tests.support.rlinf_runs import TIMEOUT, _missing
from tests.support.strategies import random_state, tiny
from tests.support.target_models import EXPERTS, assert_gets, expected
from tests.workers.rlinf_worker import (
    PAGE,
    SKIPS,
    AsRlinfBuilds,
    Layout,
    actor_of,
    diffs_of,
    is_newest,
    passes_expert_parallelism,
    source_of,
    synced,
)

pytestmark = pytest.mark.skipif(bool(_missing()), reason=f"not installed: {_missing()}")


@pytest.mark.parametrize("number", range(len(diffs_of(PAGE))))
def test_every_diff_of_the_page_fits_the_installed_rlinf(number: int) -> None:
    """Each diff makes a valid Python file, which imports only names that this library has."""
    diff = diffs_of(PAGE)[number]
    if is_newest() and SKIPS in diff.changes[0][0]:
        pytest.skip("this RLinf enters the loop on every rank")
    before, after = source_of(diff.file), diff.applied(source_of(diff.file))
    compile(after, diff.file, "exec")
    added = imports(ast.parse(after)) - imports(ast.parse(before))
    assert all(name.startswith("mcore_bridge.") for name, _ in added)
    for module, name in added:
        assert hasattr(importlib.import_module(module), name)


def imports(tree: ast.AST) -> set[tuple[str, str]]:
    """``(module, name)`` for all imports of a file."""
    froms = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return {(node.module or "", alias.name) for node in froms for alias in node.names}


GRID = [
    (TIED, "qwen2.5", ParallelDims()),
    (TIED, "qwen2.5", ParallelDims(pp=2, num_layers_in_first_pipeline_stage=2)),
    (TIED, "qwen2.5", ParallelDims(tp=2, sp=True)),
    (TIED, "qwen2.5", ParallelDims(tp=2, pp=2, sp=True, num_layers_in_first_pipeline_stage=3)),
    (TIED, "qwen2.5", ParallelDims(tp=4, sp=True)),
    (SPARSE, "qwen3_moe", ParallelDims(ep=2)),
    (SPARSE, "qwen3_moe", ParallelDims(tp=2, ep=2, sp=True)),
    (SPARSE, "qwen3_moe", ParallelDims(tp=2, pp=2, vp=2, ep=2, sp=True)),
    (SPARSE, "qwen3_moe", ParallelDims(tp=4, ep=2, etp=2, sp=True)),
    (SPARSE, "qwen3_moe", ParallelDims(tp=4, etp=4, sp=True)),
    (SPARSE, "qwen3_moe", ParallelDims(tp=4, ep=4, etp=1, sp=True)),
    (LATENT, "deepseek_v3", ParallelDims(tp=2, pp=2, ep=2, sp=True, num_layers_in_first_pipeline_stage=2)),
    (LATENT, "deepseek_v3", ParallelDims(tp=4, ep=4, sp=True)),
]
WORLD = 4


def layouts_of(model_type: str, dims: ParallelDims) -> list[Layout]:
    """Every rollout that RLinf has a rank map for: engines of TP1 to TP4, on the same GPUs or on others."""
    sizes = (dims.tp, dims.pp, dims.ep, dims.etp)
    engines: list[dict[str, Any]] = [{}]
    if model_type == "deepseek_v3" or (dims.ep > 1 and is_newest()):  # up to 0.4.0 only its DeepSeek has the functions
        engines.append({"enable_ep_moe": True})
    layouts = []
    for tp in (1, 2, 4):
        for sglang in engines:
            if dims.tp % tp == 0:
                worlds = {world for world in (dims.tp, WORLD, 2 * WORLD) if world % tp == 0}
                layouts += [Layout(model_type, *sizes, tp, world, False, sglang) for world in sorted(worlds)]
            if dims.tp % tp == 0 or (dims.tp == 1 and is_newest()):
                layouts.append(Layout(model_type, *sizes, tp, WORLD, True, sglang))
    return layouts


def syncs(hf: Any, dims: ParallelDims, layouts: list[Layout], folder: str) -> list[set[tuple[int, int]]]:
    """Runs in a worker: two syncs to each rollout, with changed weights; returns the engine ranks that this rank
    fed.
    """
    dims.initialize(device="cpu")
    state = random_state(hf)
    models = mb.build_model(hf, dims=dims, dtype=torch.float32, device="cpu", load_weights=state)
    for chunk in models:
        del chunk.bridge  # like a model that RLinf built
    fed = []
    for layout in layouts:
        actor = actor_of(models, layout, folder, CAPACITY)
        for wanted in (state, negative(state)):
            found = synced(actor, layout, folder)
            assert actor.sync_model_bucket_length > 3
            for (_, rank), tensors in found.items():
                assert_gets(tensors, expected(hf, wanted, target_of(layout, rank)))
            changed(models)
        fed.append(set(found))
    return fed


def target_of(layout: Layout, rank: int) -> EngineRank:
    """The tensors of a rank of this engine."""
    ep = layout.rollout_tp if layout.sglang.get("enable_ep_moe") else 1
    return EngineRank(tp=layout.rollout_tp, tp_rank=rank, ep=ep, ep_rank=rank % ep)


@pytest.mark.parametrize(("hf", "model_type", "dims"), GRID, ids=lambda each: getattr(each, "model_type", str(each)))
def test_every_rank_of_every_rollout_loads_its_slices(
    hf: Any, model_type: str, dims: ParallelDims, tmp_path: Path
) -> None:
    if model_type == "deepseek_v3" and not passes_expert_parallelism():
        pytest.skip("RLinf has DeepSeek since 0.4.0")
    hf.save_pretrained(tmp_path)
    layouts = layouts_of(model_type, dims)
    ranks = pool.run(WORLD, syncs, hf, dims, layouts, str(tmp_path), timeout=TIMEOUT)
    for number, layout in enumerate(layouts):
        everyone = {divmod(place, layout.rollout_tp) for place in range(layout.rollout_world)}
        assert set.union(*(fed[number] for fed in ranks)) == everyone


# data parallel attention ----------------------------------------------------------------------------------------------


def attention_in_parallel(dims: ParallelDims, layout: Layout, folder: str) -> int:
    """Runs in a worker: a sync to an engine whose attention is data parallel; returns the number of ranks fed here."""
    dims.initialize(device="cpu")
    state = random_state(LATENT)
    models = mb.build_model(LATENT, dims=dims, dtype=torch.float32, device="cpu", load_weights=state)
    found = synced(actor_of(models, layout, folder, CAPACITY), layout, folder)
    for (_, rank), tensors in found.items():
        wanted = expected(LATENT, state, EngineRank(tp=2, tp_rank=rank % 2, ep=4, ep_rank=rank))
        whole_engine = expected(LATENT, state, EngineRank(tp=4, tp_rank=rank))
        for name in wanted:
            if ".shared_experts." in name or name == "lm_head.weight":
                wanted[name] = whole_engine[name]
            elif re.search(r"layers\.\d+\.mlp\.(gate|up|down)_proj", name):
                wanted[name] = state[name]
        assert_gets(tensors, wanted)
    return len(found)


@pytest.mark.parametrize("collocated", [True, False])
def test_data_parallel_attention(collocated: bool, tmp_path: Path) -> None:
    if not is_newest():
        pytest.skip("RLinf has it after 0.4.0")
    LATENT.save_pretrained(tmp_path)
    sglang = {"enable_dp_attention": True, "dp_size": 2, "ep_size": 4, "moe_dense_tp_size": 1}
    layout = Layout("deepseek_v3", 4, 1, 4, 1, 4, WORLD, collocated, sglang)
    ranks = pool.run(
        WORLD, attention_in_parallel, ParallelDims(tp=4, ep=4, sp=True), layout, str(tmp_path), timeout=TIMEOUT
    )
    assert ranks == [1, 1, 1, 1]


# what RLinf's own resharder sends -------------------------------------------------------------------------------------

GROUPED = tiny("qwen3_moe", **EXPERTS, num_hidden_layers=4, vocab_size=256, num_key_value_heads=4)
"""RLinf's resharder cuts attention at most into groups of heads."""
OWN = [
    (ParallelDims(tp=2, ep=2, sp=True), {1: set(), 2: set()}),
    (ParallelDims(tp=4, ep=2, etp=2, sp=True), {1: set(), 2: {(0, 1), (1, 0)}, 4: set()}),
    (ParallelDims(tp=4, etp=4, sp=True), {1: set(), 2: {(0, 1), (1, 0)}, 4: set()}),
]
"""The ranks of engines of a size to which RLinf up to 0.4.0 sends wrong slices of experts."""


def wrong_experts(dims: ParallelDims, layouts: list[Layout], folder: str) -> list[set[tuple[int, int]]]:
    """Runs in a worker: for each rollout, the ranks to which RLinf's own resharder sends wrong experts."""
    dims.initialize(device="cpu")
    state = random_state(GROUPED)
    models = mb.build_model(GROUPED, dims=dims, dtype=torch.float32, device="cpu", load_weights=state)
    wrong = []
    for layout in layouts:
        actor = actor_of([AsRlinfBuilds(chunk) for chunk in models], layout, folder, CAPACITY, ours=False)
        found = synced(actor, layout, folder)
        wrong.append(set())
        for (engine, rank), tensors in found.items():
            wanted = expected(GROUPED, state, target_of(layout, rank))
            assert tensors.keys() == wanted.keys()
            differ = {name for name, tensor in tensors.items() if not torch.equal(tensor, wanted[name])}
            assert all(".experts." in name for name in differ)
            wrong[-1] |= {(engine, rank)} if differ else set()
    return wrong


@pytest.mark.parametrize(("dims", "known"), OWN, ids=lambda each: str(each) if isinstance(each, ParallelDims) else "")
def test_rlinf_itself_sends_wrong_experts_in_layouts_of_the_grid(
    dims: ParallelDims, known: dict[int, set[tuple[int, int]]], tmp_path: Path
) -> None:
    """RLinf's actor passes ``rank % tp`` to its resharder, and sends to other ranks. Right tensors show that it ran."""
    if is_newest():
        pytest.skip("this RLinf says to its resharder where it sends")
    GROUPED.save_pretrained(tmp_path)
    layouts = [layout for layout in layouts_of("qwen3_moe", dims) if layout.collocated and not layout.sglang]
    ranks = pool.run(WORLD, wrong_experts, dims, layouts, str(tmp_path), timeout=TIMEOUT)
    found = {layout.rollout_tp: set.union(*(wrong[n] for wrong in ranks)) for n, layout in enumerate(layouts)}
    assert found == known
