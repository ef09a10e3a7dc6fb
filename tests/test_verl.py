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
from tests.test_trainers import read
from tests.trainer_calls import attention_switches, violations
from tests.verl_engine import SWITCH

pytestmark = pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")

PAGE = (Path(__file__).parent.parent / "docs" / "verl.md").read_text()
ROWS = [[5, 9, 2, 40, 7], [11, 3, 8, 1, 30, 22, 6], [4, 4, 19], [50, 2, 33, 12]]
FLAVOURS = (True, False)


def in_verl(dims: ParallelDims, function: Any, *args: Any) -> Any:
    """Runs in a worker, with what verl sets on the process undone afterwards."""
    from tests.verl_engine import CpuForCuda, own_processes, use_us_on_cpu

    os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # under which verl registers its engine; others do not look at it
    use_us_on_cpu()
    with own_processes(), attention_switches(), stepping.mesh(dims), CpuForCuda():
        return function(*args)


def with_tokenizer(folder: Path) -> str:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(90)}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")), pad_token="3", eos_token="1", bos_token="2"
    )
    fast.save_pretrained(folder)
    return str(folder)


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


def life(folder: str, out: str, vanilla: bool, value: bool, sizes: dict[str, int]) -> dict[str, Any]:
    """Runs in a worker: init, load, forward, export, a step, save; then a second engine that resumes."""
    from tests.verl_engine import batch_of, engine_of, exported, mean_of

    name = "values" if value else "log_probs"
    engine = engine_of(folder, vanilla=vanilla, value=value, **sizes)
    truth = read(folder)
    broken, order = violations(exported(engine), None if value else truth)
    with engine.eval_mode():
        said = engine.infer_batch(batch_of(ROWS)).get("model_output")
    with engine.train_mode():
        engine.train_batch(batch_of(ROWS), mean_of(name))
    trained = {key: tensor.clone() for key, tensor in exported(engine)}
    engine.save_checkpoint(out, global_step=1)
    other = engine_of(folder, vanilla=vanilla, value=value, **sizes)
    with other.train_mode():  # without TransformerEngine mcore's optimizer resumes only what has taken a step
        other.train_batch(batch_of(ROWS[::-1]), mean_of(name))
    other.load_checkpoint(out, del_local_after_load=False)
    resumed = dict(exported(other))
    broken += [f"{key} is lost" for key in trained if not torch.equal(trained[key], resumed[key])]
    states = zip(optimizer_state(engine), optimizer_state(other), strict=True)
    broken += ["the optimizer's state is lost" for here, there in states if not torch.equal(here, there)]
    outputs = {key: [row.float() for row in tensor.unbind()] for key, tensor in (said or {}).items()}
    bridge = type(engine.bridge).__module__
    return {"broken": broken, "order": order, "said": outputs, "trained": trained, "bridge": bridge}


def optimizer_state(engine: Any) -> list[torch.Tensor]:
    """Main parameters and their moments; not the steps, which mcore miscounts without TransformerEngine."""
    wrapped = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    return [
        tensor
        for each in wrapped
        for parameter, state in each.optimizer.state.items()
        for tensor in (parameter.detach(), state["exp_avg"], state["exp_avg_sq"])
    ]


def test_the_line_of_the_page_reaches_every_process():
    """What docs/verl.md has users write, through the config and the environment that verl makes for its processes."""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    (line,) = re.findall(r"^\+ray_kwargs.*$", PAGE, re.MULTILINE)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_megatron_trainer", overrides=[line])
    given = config.ray_kwargs.ray_init.runtime_env
    assert OmegaConf.merge({"env_vars": {"OTHER": "1"}}, given).env_vars == {**SWITCH, "OTHER": "1"}


MESHES = [
    (
        "dense",
        ParallelDims(tp=2, pp=2, vp=2, sp=True),
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
        },
    ),
    ("sparse", ParallelDims(tp=2, ep=2, sp=True), {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}),
]


@pytest.mark.parametrize("vanilla", FLAVOURS, ids=["mbridge", "megatron_bridge"])
@pytest.mark.parametrize("value", [False, True], ids=["actor", "critic"])
@pytest.mark.parametrize(("kind", "dims", "sizes"), MESHES, ids=["tp2-pp2-vp2", "tp2-ep2"])
def test_a_life(kind, dims, sizes, value, vanilla, request, tmp_path):
    folder = request.getfixturevalue(kind)
    sizes = {**sizes, "expert_tensor_parallel_size": 1}
    ranks = pool.run(dims.tp * dims.pp, in_verl, dims, life, folder, str(tmp_path), vanilla, value, sizes)
    truth, saved = read(folder), read(tmp_path / "model" / "huggingface")
    for rank in ranks:
        assert rank["broken"] == []
        assert rank["order"] == ranks[0]["order"]
        assert rank["bridge"] == (
            "mcore_bridge.trainers.mbridge" if vanilla else "mcore_bridge.trainers.megatron_bridge"
        )
        assert all(torch.equal(saved[name], tensor) for name, tensor in rank["trained"].items())
    assert any(not torch.equal(saved[name], truth[name]) for name in truth if name in saved)
    said = ranks[-1]["said"]
    if value:
        assert [len(row) for row in said["values"]] == [len(row) for row in ROWS]
        assert saved["score.weight"].shape[0] == 1
        return
    assert saved.keys() == truth.keys()
    for row, found, entropy in zip(ROWS, said["log_probs"], said["entropy"], strict=True):
        expected, expected_entropy = reference(folder, row)
        assert (found[:-1] - expected).abs().mean() < 0.1
        assert (entropy[:-1] - expected_entropy).abs().mean() < 0.1


def reference(folder: str, row: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """What transformers computes at the temperature of the batch, of the labels and of the whole vocabulary."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        logits = model(torch.tensor([row])).logits[0].float() / 0.5
    scores = logits.log_softmax(-1)
    return scores[:-1].gather(-1, torch.tensor(row[1:])[:, None])[:, 0], -(scores.exp() * scores).sum(-1)[:-1]


def replay(folder: str, vanilla: bool) -> tuple[int, int, list[Any]]:
    """Runs in a worker: the routers that verl knows, those that there are, and the routes that it records."""
    from megatron.core.transformer.moe.router import TopKRouter
    from verl.utils import tensordict_utils as tu
    from verl.utils.megatron.router_replay_patch import RouterReplay

    from tests.verl_engine import batch_of, engine_of

    engine = engine_of(folder, vanilla=vanilla, replay="R2")
    batch = batch_of(ROWS[:2])
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
    assert routes == [(len(row), 3, 4) for row in ROWS[:2]]  # each token has four experts
