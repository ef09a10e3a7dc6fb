"""verl's engine and checkpoint manager use the library. verl must be installed, as in docs/trainers/verl.md."""

import asyncio
import importlib.util
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mcore_bridge import ParallelDims
from mcore_bridge.convert.convert import convert
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.hybrid_support import RELEASE
from mcore_bridge.trainers.peft_functions import KEYS, create_peft
from tests import zoo
from tests.support import composites, pool, seeing, stepping, tiny, towers
from tests.support.conversions import quiet
from tests.support.settings_of_trainers import BECOMES, ENGINE, SIIRL
from tests.support.strategies import random_state, save
from tests.support.trainer_calls import attention_switches
from tests.support.written_weights import read
from tests.workers import verl_composites, verl_delta, verl_images, verl_lora
from tests.workers.rlinf_worker import diffs_of
from tests.workers.verl_engine import SWITCH, CpuForCuda, engine_of, kernels_on_cpu, own_processes, use_us_on_cpu
from tests.workers.verl_life import (
    batch_of,
    copied,
    differing,
    inferred,
    life,
    padded,
    problems,
    resumed,
    step,
    with_tokenizer,
)

pytestmark = pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")

PAGE = (Path(__file__).parent.parent.parent / "docs" / "trainers" / "verl.md").read_text()
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
    """The setting of docs/trainers/verl.md works through the config and the environment of verl's processes."""
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


def folder_of(case, folder):
    hf = zoo.cases()[case].hf
    hf.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[hf.model_type]]
    folder.mkdir()
    save(random_state(hf, dtype=torch.bfloat16), hf, folder)
    return with_tokenizer(folder)


MODULES = ("gemma4-own-values", "hy_v4", "kimi_linear", "lfm2")
"""Sizes by layer, streams of residuals, decay by channel, and short convolutions."""


@pytest.mark.parametrize("name", zoo.params(MODULES))
def test_a_life_with_modules_of_our_own(name, tmp_path):
    folder, dims = folder_of(name, tmp_path / "hf"), ParallelDims(tp=2, pp=2, sp=True)
    ranks = pool.run(dims.tp * dims.pp, in_verl, dims, life, folder, str(tmp_path), {"vanilla": False})
    found = problems(ranks, folder, tmp_path, vanilla=False)
    if name == "hy_v4":  # streams have three scales in bf16; verl 0.9.1 aligns what follows
        found = [each for each in found if "between its elements" not in each]
    assert found == []


HYBRID = {
    "mbridge, critic": ("qwen2", MESHES["dense"], {"vanilla": True, "value": True}),
    "megatron_bridge": ("nemotron_h-no-experts", ParallelDims(tp=2, pp=2, sp=True), {"vanilla": False}),
    "megatron_bridge, experts": ("nemotron_h", MESHES["sparse"], {"vanilla": False}),
    "mbridge, rows": ("nemotron_h", MESHES["sparse"], {"vanilla": True, "use_remove_padding": False}),
}


@pytest.mark.skipif(not RELEASE.is_installed, reason="the installed megatron-core has no HybridModel")
@pytest.mark.parametrize("name", HYBRID)
def test_a_life_as_hybrid_model_is_that_of_a_gpt_model(name, tmp_path):
    """Its outputs, and its export after a step, have the bits of ``model="gpt"``."""
    case, dims, options = HYBRID[name]
    if not zoo.here([case]):
        pytest.skip("the installed transformers lacks it")
    folder, lives = folder_of(case, tmp_path / "hf"), []
    for model in ("gpt", "hybrid"):
        out, own = tmp_path / model, {**options, "overrides": {"model": model}}
        lives.append(pool.run(dims.tp * dims.pp, in_verl, dims, life, folder, str(out), own))
        assert problems(lives[-1], folder, out, vanilla=options["vanilla"]) == []
    for one, other in zip(*lives, strict=True):
        assert [each["models"] for each in (one, other)] == [["GPTModel"], ["HybridModel"]]
        assert differing(one["trained"], other["trained"]) == []
        assert differing(one["said"], other["said"]) == []
        assert one["norm"] == other["norm"]


FC = ("linear_fc1", "linear_fc2")
PARTS = ("linear_q", "linear_v", "linear_fc1_up")
ADAPTED = ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj", *FC)
LORA = {
    "shared, sent beside": ("dense", {"type": "lora", "rank": 8, "alpha": 16, "merge": False}),
    "parts, sent beside": ("dense", {"type": "canonical_lora", "rank": 2, "merge": False, "target_modules": PARTS}),
    "own, merged": (
        "sparse",
        {"type": "canonical_lora", "rank": 4, "alpha": 8, "merge": True, "dtype": "bf16", "target_modules": ADAPTED},
    ),
    "critic": ("dense", {"rank": 4, "alpha": 8, "merge": False, "lora_A_init_method": "kaiming"}),
}


@pytest.mark.parametrize("name", LORA)
def test_a_life_with_adapters(name, request, tmp_path):
    kind, lora = LORA[name]
    folder, dims = request.getfixturevalue(kind), MESHES[kind]
    value = name == "critic"
    ranks = pool.run(dims.tp * dims.pp, in_verl, dims, verl_lora.life, folder, str(tmp_path), lora, value)
    assert ranks == [[]] * (dims.tp * dims.pp)


def test_the_page_has_every_key_of_lora():
    import yaml

    (path,) = importlib.util.find_spec("verl").submodule_search_locations
    theirs = yaml.safe_load((Path(path) / "trainer" / "config" / "model" / "hf_model.yaml").read_text())["lora"]
    rows = re.findall(r"^\| (`.+?) \| ", PAGE.partition("## LoRA")[2].partition("\n## ")[0], re.MULTILINE)
    keys = {key for cell in rows for key in re.findall(r"`(\w+)`", cell)}
    assert keys == KEYS == theirs.keys() | {"fully_sharded_loras"}
    assert create_peft({**theirs, "rank": 8}).dim == 8, "verl's own values are honoured"


def patched(file: str, number: int) -> dict[str, Any]:
    """The names of a module of verl as a user has it who follows the page."""
    blocks = re.findall(r"```diff\n(.*?)```", PAGE.partition("## LoRA")[2].partition("\n## ")[0], re.DOTALL)
    (diff,) = diffs_of(f"`rlinf/x.py`\n```diff\n{blocks[number]}```\n")
    (folder,) = importlib.util.find_spec("verl").submodule_search_locations
    names = {"__name__": f"verl.{file.removesuffix('.py').replace('/', '.')}", "__file__": file}
    names["__package__"] = names["__name__"].rpartition(".")[0]
    exec(compile(diff.applied((Path(folder) / file).read_text()), file, "exec"), names)
    return names


def apart(dims: ParallelDims, folder: str) -> tuple[str, list[str], dict[str, Any]]:
    """Runs in a worker: the error if base weights are exported a second time, and the weights for a rollout on other
    GPUs.
    """
    lora = {"rank": 2, "merge": False}
    engine = engine_of(folder, dims, vanilla=False, lora=lora)
    engine.get_per_tensor_param()
    with pytest.raises(ConfigError) as caught:
        engine.get_per_tensor_param()
    rollout = SimpleNamespace(checkpoint_engine=SimpleNamespace(backend="nccl"))
    found: dict[str, Any] = {}

    async def send(weights: Any, **options: Any) -> None:
        found["names"] = [name for name, _ in weights]

    async def update(weights: Any, **options: Any) -> None:
        found["options"] = options

    sender = SimpleNamespace(config=SimpleNamespace(rollout=rollout), actor=SimpleNamespace(engine=engine))
    sender.checkpoint_engine = SimpleNamespace(send_weights=send)
    receiver = SimpleNamespace(model_config=engine.model_config, server_adapter=SimpleNamespace(update_weights=update))
    receiver.checkpoint_engine = SimpleNamespace(receive_weights=lambda **options: ())
    asyncio.run(patched("workers/engine_workers.py", 0)["ActorRolloutRefWorker"].update_weights(sender))
    asyncio.run(patched("checkpoint_engine/base.py", 1)["CheckpointEngineWorker"].update_weights(receiver))
    return str(caught.value), found["names"], found["options"]


@pytest.mark.skipif(importlib.util.find_spec("uvicorn") is None, reason="verl's checkpoint engines import uvicorn")
def test_adapters_reach_rollouts_on_other_gpus_by_the_diff_of_the_page(dense):
    ((said, names, options),) = pool.run(1, in_verl, ParallelDims(), apart, dense)
    assert "verl#7495" in said
    assert names
    assert all(".lora_" in name for name in names)
    assert options["base_sync_done"]
    assert options["peft_config"]["r"] == 2


@pytest.mark.skipif(importlib.util.find_spec("uvicorn") is None, reason="verl's checkpoint engines import uvicorn")
@pytest.mark.parametrize(
    ("kind", "dims"),
    [("dense", MESHES["dense"]), ("sparse", MESHES["sparse"]), ("sparse", ParallelDims(tp=2, pp=2, ep=2, sp=True))],
    ids=["TP2 PP2 VP2", "TP2 EP2", "TP2 PP2 EP2"],
)
def test_deltas_are_a_full_sync(kind, dims, request):
    """``delta_sharded``: verl compares shards and gathers changes, and our bridge says where they are."""
    ranks = pool.run(dims.tp * dims.pp, in_verl, dims, verl_delta.engine_life, request.getfixturevalue(kind))
    assert [rank["problems"] for rank in ranks] == [[]] * len(ranks)
    trained, few = (count / ranks[0]["numel"] for count in ranks[0]["counts"])
    assert trained > 0.5
    assert 0.005 < few < 0.02


def test_a_life_of_padded_rows(dense, tmp_path):
    """Without ``use_remove_padding``, as verl requires for models that do not support packed sequences."""
    dims, options = MESHES["dense"], {"vanilla": False, "use_remove_padding": False}
    ranks = pool.run(dims.tp * dims.pp, in_verl, dims, life, dense, str(tmp_path), options)
    assert problems(ranks, dense, tmp_path, vanilla=False) == []


COMPOSITES = {
    "packed-tp": ("qwen3_vl", ParallelDims(tp=2, sp=True), {"vanilla": True}),
    "packed-pp": ("qwen3_5", ParallelDims(pp=2), {"vanilla": False}),
    "packed-cp": ("qwen3_vl", ParallelDims(tp=2, cp=2, sp=True), {"vanilla": False}),
    "rows-tp": ("qwen3_5", ParallelDims(tp=2, sp=True), {"vanilla": False, "use_remove_padding": False}),
    "rows-pp": ("qwen3_vl", ParallelDims(pp=2), {"vanilla": True, "use_remove_padding": False}),
    "rows-cp": ("qwen3_vl", ParallelDims(cp=2), {"vanilla": True, "use_remove_padding": False}),
}


@pytest.mark.parametrize("name", COMPOSITES)
def test_a_life_of_a_composites_text(name, tmp_path):
    """verl hands padded rows to whatever has a vision_config, packed or not."""
    family, dims, options = COMPOSITES[name]
    if family not in composites.NAMES:
        pytest.skip(f"transformers has no {family}")
    composites.written(family, tmp_path / "hf")
    folder, out = with_tokenizer(tmp_path / "hf"), tmp_path / "out"
    ranks = pool.run(dims.tp * dims.pp * dims.cp, in_verl, dims, verl_composites.life, folder, str(out), options)
    assert verl_composites.problems(ranks, folder, out) == []


IMAGES = {
    "packed-tp": ("qwen3_vl", ParallelDims(tp=2, sp=True), {"vanilla": True}, "train"),
    "packed-pp": ("qwen3_5", ParallelDims(pp=2), {"vanilla": False}, "train"),
    "packed-cp": ("qwen2_5_vl", ParallelDims(cp=2), {"vanilla": False}, "frozen"),
    "rows-tp": ("qwen2_5_vl", ParallelDims(tp=2, sp=True), {"vanilla": True, "use_remove_padding": False}, "train"),
    "fused-tp": ("qwen3_vl", ParallelDims(tp=2, sp=True), {"vanilla": True, "use_fused_kernels": True}, "train"),
    "fused-pp": ("qwen3_vl", ParallelDims(pp=2), {"vanilla": False, "use_fused_kernels": True}, "train"),
}


@pytest.mark.parametrize("name", IMAGES)
def test_a_life_with_images(name, tmp_path):
    """Log-probs equal transformers' with images. The tower is trained, exported and saved."""
    family, dims, options, vision = IMAGES[name]
    if family not in towers.NAMES:
        pytest.skip(f"the installed transformers has no tower for {family}")
    seeing.written(family, tmp_path / "hf")
    batch = seeing.batch_of(seeing.reference(tmp_path / "hf"))
    folder, out = with_tokenizer(tmp_path / "hf"), tmp_path / "out"
    options = {**options, "overrides": {"vision": vision}}
    world_size = dims.tp * dims.pp * dims.cp
    ranks = pool.run(world_size, in_verl, dims, verl_images.life, folder, str(out), options, batch)
    assert verl_images.problems(ranks, folder, batch, frozen=vision == "frozen") == []


def from_files_of_megatron(dims: ParallelDims, folder: str, files: str, out: str) -> list[str]:
    """Runs in a worker: differences between the export of an engine that verl loads and the HF file, also after a
    resume.
    """
    options = {"vanilla": False, "use_dist_checkpointing": True, "dist_checkpointing_path": files}
    options["overrides"] = {"hetereogenous_dist_checkpoint": True}  # keys for each layer, of dense models too
    engine = engine_of(folder, dims, **options)
    broken = differing(copied(engine), read(folder))
    vocab_size = engine.model_config.hf_config.vocab_size
    said = inferred(engine, vocab_size)
    step(engine, vocab_size, said)
    trained = copied(engine)
    engine.save_checkpoint(out, global_step=1)
    other = resumed(engine_of(folder, dims, **options), out, vocab_size, said)
    return broken + [f"{name} is lost" for name in differing(copied(other), trained)]


@pytest.mark.parametrize("kind", MESHES)
def test_verl_loads_what_convert_writes_and_resumes_from_its_own(kind, request, tmp_path):
    """``use_dist_checkpointing``: verl loads and saves megatron-core's files, and we only build the model.

    The test has no virtual stages: verl loads chunk by chunk, and megatron-core then misses tied embeddings in the
    first chunk.
    """
    folder, dims = request.getfixturevalue(kind), replace(MESHES[kind], vp=1)
    convert(Path(folder), tmp_path / "files", on_event=quiet)
    ranks = pool.run(
        dims.tp * dims.pp,
        in_verl,
        dims,
        from_files_of_megatron,
        folder,
        str(tmp_path / "files"),
        str(tmp_path / "out"),
    )
    assert ranks == [[]] * (dims.tp * dims.pp)


def test_the_page_has_every_key_of_the_engine():
    import yaml

    (path,) = importlib.util.find_spec("verl").submodule_search_locations
    theirs = yaml.safe_load((Path(path) / "trainer" / "config" / "engine" / "megatron.yaml").read_text())
    assert SIIRL | theirs.keys() - {"_target_"} == ENGINE
    assert theirs["override_transformer_config"].keys() <= BECOMES.keys()


REFUSED = {
    "use_mbridge must be True": {"use_mbridge": False},
    "use_megatron_fsdp must be False": {"use_megatron_fsdp": True},
    "Dynamic CP requires": {"dynamic_context_parallel": True, "max_seqlen_per_dp_cp_rank": 64},
}


def refusals(dims: ParallelDims, folder: str) -> list[str]:
    """Run in a worker: the error of an engine with each of these."""
    said = []
    for fields in REFUSED.values():
        with pytest.raises((AssertionError, ConfigError, RuntimeError)) as caught:
            engine_of(folder, dims, vanilla=False, **fields)
        said.append(str(caught.value))
    return said


def test_what_the_page_says_is_refused_is(dense):
    (said,) = pool.run(1, in_verl, ParallelDims(), refusals, dense)
    assert [found for words, found in zip(REFUSED, said, strict=True) if words not in found] == []


def qat(dims: ParallelDims, folder: str) -> list[str]:
    """Runs in a worker: the weights that a QAT of MLPs alone sends otherwise than it should."""
    from verl.workers.config import QATEngineConfig

    ignored = ["lm_head", "*mlp.gate", "*self_attn*"]
    engine = engine_of(folder, dims, vanilla=False, qat=QATEngineConfig(enable=True, ignore_patterns=ignored))
    plain, found = read(folder), copied(engine)
    encoded = {name for name in plain if found.keys() >= {f"{name}_scale", f"{name}_scale_2"}}
    wrong = sorted(encoded ^ {name for name in plain if ".mlp." in name and "norm" not in name})
    wrong += [name for name in encoded if found[name].dtype != torch.uint8]
    return wrong + [name for name in plain.keys() - encoded if not torch.equal(plain[name], found[name])]


@pytest.mark.skipif(importlib.util.find_spec("modelopt") is None, reason="ModelOpt is not installed")
def test_a_qat_leaves_in_nvfp4(dense):
    """ModelOpt's quantizers need a GPU for a forward, so no step is made."""
    assert pool.run(1, in_verl, ParallelDims(), qat, dense) == [[]]


def fused_life(dims: ParallelDims, folder: str, out: str, vanilla: bool) -> Any:
    """Runs in a worker: all steps of an engine with fused kernels, which compute log-probs without the output layer."""
    kernels_on_cpu()
    return life(dims, folder, out, {"vanilla": vanilla, "use_fused_kernels": True})


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("vanilla", FLAVOURS, ids=["mbridge", "megatron_bridge"])
def test_fused_kernels_see_no_padding(vanilla, tied, tmp_path):
    """The vocabulary has nine tokens, so one token of padding in a softmax exceeds the bound."""
    folder, out = tmp_path / "hf", tmp_path / "out"
    hf = tiny.config("qwen2", use_sliding_window=False, vocab_size=9, tie_word_embeddings=tied)
    tiny.random_checkpoint(hf, folder, dtype=torch.bfloat16)
    dims = ParallelDims(tp=2, sp=True)
    ranks = pool.run(2, in_verl, dims, fused_life, with_tokenizer(folder), str(out), vanilla)
    assert problems(ranks, str(folder), out, vanilla=vanilla) == []


def capped(dims: ParallelDims, folder: str) -> str:
    """Runs in a worker: the error of verl's fused kernels for a model that changes logits after the output layer."""
    engine = engine_of(folder, dims, vanilla=True, use_fused_kernels=True)
    with pytest.raises(ConfigError) as caught:
        inferred(engine, engine.model_config.hf_config.vocab_size)
    return str(caught.value)


def test_fused_kernels_are_refused_where_logits_are_capped(tmp_path):
    hf = zoo.cases()["gemma2"].hf
    hf.architectures = ["Gemma2ForCausalLM"]
    save(random_state(hf, dtype=torch.bfloat16), hf, tmp_path)
    (said,) = pool.run(1, in_verl, ParallelDims(), capped, with_tokenizer(tmp_path))
    assert "caps them at" in said
    assert "use_fused_kernels=False" in said


def superseded(dims: ParallelDims) -> tuple[list[str], str]:
    """Runs in a worker: the errors of verl's functions from before bridges, and the module of another function."""
    import verl.models.mcore as theirs
    from verl.models.mcore.registry import get_supported_model

    said = []
    for name in ("hf_to_mcore_config", "init_mcore_model", "get_mcore_weight_converter"):
        with pytest.raises(ConfigError, match=f"{name} is not served") as caught:
            getattr(theirs, name)(tiny.config("qwen3"), torch.bfloat16)
        said.append(str(caught.value))
    return said, get_supported_model("Qwen3ForCausalLM").name


def test_what_verl_had_before_bridges_is_refused_by_name():
    ((said, name),) = pool.run(1, in_verl, ParallelDims(), superseded)
    assert all("up to 0.7.1" in each and "mcore-bridge convert" in each for each in said)
    assert name == "QWEN3"


def replay(dims: ParallelDims, folder: str, vanilla: bool) -> tuple[int, int, list[Any]]:
    """Run in a worker: the routers that verl finds, the routers of the model, and the routes that verl records."""
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
