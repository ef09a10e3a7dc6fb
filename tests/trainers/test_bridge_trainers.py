"""miles, SkyRL and AReaL use the library in the place of Megatron-Bridge. Each needs its checkout: see its page."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mcore_bridge import ParallelDims
from tests.support import pool, tiny
from tests.support.target_models import assert_gets
from tests.support.written_weights import read
from tests.workers import bridge_trainers
from tests.workers.rlinf_worker import diffs_of

pytestmark = pytest.mark.usefixtures("own_workers")
PAGES = Path(__file__).parent.parent.parent / "docs" / "trainers"
MESH = ParallelDims(tp=2, pp=2, sp=True)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return str(tiny.random_checkpoint(tiny.config("qwen2"), tmp_path_factory.mktemp("qwen2"), dtype=torch.bfloat16))


def ranks_of(name, folder, out):
    missing = [each for each in (name, "ray") if importlib.util.find_spec(each) is None]
    if missing:
        pytest.skip(f"not installed: {missing}")
    (package,) = importlib.util.find_spec(name).submodule_search_locations
    for diff in diffs_of((PAGES / f"{name}.md").read_text(), name):
        compile(diff.applied((Path(package).parent / diff.file).read_text()), diff.file, "exec")
    return pool.run(4, getattr(bridge_trainers, name), MESH, folder, str(out))


@pytest.mark.parametrize("name", ["miles", "skyrl", "areal"])
def test_a_trainer_builds_loads_sends_and_saves(name, dense, tmp_path):
    truth, ranks = read(dense), ranks_of(name, dense, tmp_path)
    for found in ranks:
        assert_gets(found["loaded"], truth)
        assert_gets(found["saved"], truth)
        if name == "skyrl":
            assert_gets(found["sent"], truth)
            assert found["metadata"] == [*found["sent"]]
    if name == "areal":
        assert ranks[0]["dtype"] == "torch.bfloat16"
        assert_gets({each: tensor for found in ranks for each, tensor in found["sent"].items()}, truth)
        return
    merged = ranks[0]["merged"]
    moved = [each for each, tensor in merged.items() if not torch.equal(tensor, truth[each])]
    assert len(moved) == 7 * tiny.config("qwen2").num_hidden_layers
    check_adapters(name, ranks[0], tmp_path / "adapter")


def check_adapters(name, found, folder):
    """The folder that the trainer itself writes has the adapters under PEFT's names."""
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (bridge_trainers.RANK, bridge_trainers.ALPHA)
    assert sorted(config["target_modules"]) == sorted(
        f"{each}_proj" for each in ("q", "k", "v", "o", "gate", "up", "down")
    )
    if name == "skyrl":
        written = load_file(folder / "adapter_model.safetensors")
        assert_gets(written, {f"base_model.model.{each}": own.float() for each, own in found["adapters"].items()})
        return
    assert_gets(torch.load(folder / "adapter_model.bin"), found["adapters"])
    assert_gets(found["merged saved"], found["merged"])
    names = dict(found["triples"])
    first = "layers.0.self_attn.q_proj.lora_A.weight"
    assert names[f"model.{first}"] == "decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.weight"
