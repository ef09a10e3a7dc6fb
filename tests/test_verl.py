"""verl's own engine and checkpoint manager, driving us. Runs where verl is installed: docs/verl.md says how."""

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_bridge import ParallelDims
from tests import pool, stepping, tiny, zoo
from tests.strategies import random_state, save
from tests.trainer_calls import attention_switches
from tests.verl_engine import SWITCH, CpuForCuda, engine_of, own_processes, use_us_on_cpu
from tests.verl_life import batch_of, life, padded, problems, with_tokenizer

pytestmark = pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")

PAGE = (Path(__file__).parent.parent / "docs" / "verl.md").read_text()
FLAVOURS = (True, False)


def in_verl(dims: ParallelDims, function: Any, *args: Any) -> Any:
    """Runs in a worker, with what verl sets on the process undone afterwards."""
    os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # under which verl registers its engine; others do not look at it
    use_us_on_cpu()
    with own_processes(), attention_switches(), stepping.mesh(dims), CpuForCuda():
        return function(dims, *args)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen2")
    tiny.random_checkpoint(tiny.config("qwen2", use_sliding_window=False), folder, dtype=torch.bfloat16)
    return with_tokenizer(folder)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepseek_v3")
    hf = zoo.cases()["deepseek_v3"].hf
    hf.architectures = ["DeepseekV3ForCausalLM"]
    save(random_state(hf, dtype=torch.bfloat16), hf, folder)
    return with_tokenizer(folder)


def test_the_line_of_the_page_reaches_every_process():
    """What docs/verl.md has users write, through the config and the environment that verl makes for its processes."""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    (line,) = re.findall(r"^\+ray_kwargs.*$", PAGE, re.MULTILINE)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_megatron_trainer", overrides=[line])
    given = config.ray_kwargs.ray_init.runtime_env
    assert OmegaConf.merge({"env_vars": {"OTHER": "1"}}, given).env_vars == {**SWITCH, "OTHER": "1"}


MESHES = {"dense": ParallelDims(tp=2, pp=2, vp=2, sp=True), "sparse": ParallelDims(tp=2, ep=2, sp=True)}


@pytest.mark.parametrize("vanilla", FLAVOURS, ids=["mbridge", "megatron_bridge"])
@pytest.mark.parametrize("value", [False, True], ids=["actor", "critic"])
@pytest.mark.parametrize("kind", MESHES)
def test_a_life(kind, value, vanilla, request, tmp_path):
    folder, dims = request.getfixturevalue(kind), MESHES[kind]
    options = {"vanilla": vanilla, "value": value}
    ranks = pool.run(dims.tp * dims.pp, in_verl, dims, life, folder, str(tmp_path), options)
    assert problems(ranks, folder, tmp_path, vanilla=vanilla) == []


def replay(dims: ParallelDims, folder: str, vanilla: bool) -> tuple[int, int, list[Any]]:
    """Runs in a worker: the routers that verl knows, those that there are, and the routes that it records."""
    from megatron.core.transformer.moe.router import TopKRouter
    from verl.utils import tensordict_utils as tu
    from verl.utils.megatron.router_replay_patch import RouterReplay

    engine = engine_of(folder, dims, vanilla=vanilla, replay="R2")
    batch = batch_of(engine.model_config.hf_config.vocab_size, slice(2))
    tu.assign_non_tensor(batch, enable_routing_replay=True)
    with engine.eval_mode():
        routes = engine.infer_batch(batch)["model_output"]["routed_experts"]
    routers = [module for module in engine.module[0].modules() if isinstance(module, TopKRouter)]
    return len(RouterReplay.router_instances), len(routers), [tuple(row.shape) for row in routes.unbind()]


@pytest.mark.parametrize("vanilla", FLAVOURS, ids=["mbridge", "megatron_bridge"])
def test_router_replay(vanilla, sparse):
    """verl counts routers as they are constructed, and finds them by their number: none may be built in vain."""
    try:
        ((known, built, routes),) = pool.run(1, in_verl, ParallelDims(), replay, sparse, vanilla)
    finally:
        pool._stop(dump=False)  # verl's patches last as long as the process
    assert known == built == 3
    assert routes == [(int(row.sum()), 3, 4) for row in padded(2)[1][:2]]  # each token has four experts
