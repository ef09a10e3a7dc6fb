"""verl's own test of its actor's engine, with our plug-in, in processes that Ray starts: on CPUs, or on GPUs.

docs/trainers/verl.md says how to install Ray and verl and where verl's tests have to be. Their file is run as it is, on
random models in the folders where it looks for published ones; of megatron it asks one rank, or eight as TP2 PP2 CP2.
The checkout also has verl's examples, whose settings docs/trainers/verl.md has to have.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from tests.support.gpu_models import SIZES
from tests.support.settings_of_trainers import BECOMES
from tests.support.strategies import random_state, save, tiny

FILE = Path(__file__).parent.parent.parent.parent / "verl" / "tests" / "models" / "test_engine.py"
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed"),
    pytest.mark.skipif(not FILE.exists(), reason=f"needs verl's tests, {FILE}"),
]
HEADS = {**SIZES, "vocab_size": 90, "num_key_value_heads": 4, "tie_word_embeddings": True}
MODELS = {
    1: ("HuggingFaceTB/SmolLM2-135M-Instruct", tiny("llama", **HEADS, architectures=["LlamaForCausalLM"])),
    8: ("Qwen/Qwen2.5-0.5B", tiny("qwen2", **HEADS, architectures=["Qwen2ForCausalLM"], use_sliding_window=False)),
}
"""Which one verl's test takes of so many ranks, below its home's ``models``, and ours in its place."""
ATTENTION = {"attention_backend": "auto"}


def run(home, num_ranks, vanilla, **settings):
    """The output at the end of the test."""
    from verl.workers.config import McoreEngineConfig

    from tests.workers.verl_life import with_tokenizer

    name, hf = MODELS[num_ranks]
    model = home / "models" / name
    model.mkdir(parents=True)
    save(random_state(hf, dtype=torch.bfloat16), hf, model)
    with_tokenizer(model)
    text = FILE.read_text()
    if "grad_offload" not in {field.name for field in fields(McoreEngineConfig)}:  # verl 0.9.1 no longer has it
        text = text.replace("grad_offload=True,", "")
    if importlib.util.find_spec("flash_attn") is None:  # verl requires it to use Megatron-Bridge
        text = text.replace("use_mbridge=True,", f"use_mbridge=True, override_transformer_config={ATTENTION},")
    (home / FILE.name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "test_actor_engine and megatron"]
    environment = {
        **os.environ,
        "HOME": str(home),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "RAY_USAGE_STATS_ENABLED": "0",
        "VANILLA_MBRIDGE": str(vanilla),
        **settings,
    }
    done = subprocess.run([*command, FILE.name], cwd=home, env=environment, capture_output=True, text=True, timeout=500)
    return done.stdout


@pytest.mark.parametrize("num_ranks", MODELS)
@pytest.mark.parametrize("vanilla", [True, False], ids=["mbridge", "megatron-bridge"])
def test_an_actor_on_cpus(vanilla, num_ranks, tmp_path):
    resources = json.dumps({"rank": num_ranks, "CPU": 16 * num_ranks})
    settings = {"VERL_USE_EXTERNAL_MODULES": "tests.workers.verl_on_cpu", "RANKS": str(num_ranks)}
    said = run(tmp_path, num_ranks, vanilla, **settings, RAY_OVERRIDE_RESOURCES=resources, OMP_NUM_THREADS="1")
    assert "1 passed" in said, said[-5000:]


@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", MODELS)
@pytest.mark.parametrize("vanilla", [True, False], ids=["mbridge", "megatron-bridge"])
def test_an_actor_on_gpus(vanilla, num_ranks, tmp_path):
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs, found {torch.cuda.device_count()}")
    seen = ",".join(map(str, range(num_ranks)))
    settings = {"VERL_USE_EXTERNAL_MODULES": "mcore_bridge.trainers.verl", "CUDA_VISIBLE_DEVICES": seen}
    said = run(tmp_path, num_ranks, vanilla, **settings)
    assert "1 passed" in said, said[-5000:]


def test_every_setting_of_verls_examples_is_on_the_page():
    """The settings are each X of ``override_transformer_config.X`` in verl's scripts, configs and guides."""
    paths = [path for kind in ("sh", "yaml", "md", "rst") for path in FILE.parents[2].rglob(f"*.{kind}")]
    keys = {key for path in paths for key in re.findall(r"override_transformer_config\.(\w+)", path.read_text())}
    assert len(keys) > 40, "examples are elsewhere now"
    assert keys - BECOMES.keys() == set()
