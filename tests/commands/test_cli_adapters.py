"""``verify --adapter``: an adapter that peft saved is exported bit by bit, and has the logits that peft computes."""

import json

import peft
import pytest
import torch

from tests import zoo
from tests.support import experts, seeing, tiny, towers
from tests.support.command import refused, run
from tests.support.peft_merges import merged as merged_by_peft
from tests.support.peft_models import EXPERTS

CASES = {
    "llama": (lambda: tiny.config("llama"), ("q_proj", "v_proj", "down_proj"), ("--tp", 2, "--sp")),
    "qwen3_moe": (lambda: experts.HF, ("o_proj", *EXPERTS), ("--ep", 2)),
}


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_of_peft_is_exact_on_a_mesh(case, tmp_path):
    make, targets, mesh = CASES[case]
    if EXPERTS[0] in targets and not zoo.NEWEST:
        pytest.skip("transformers 4 has a module for each expert")
    hf = make()
    tiny.random_checkpoint(hf, tmp_path / "base", dtype=torch.bfloat16)
    options = {"use_dora": True, "lora_dropout": 0.1} if case == "llama" else {}
    merged_by_peft(hf, targets, torch.bfloat16, tmp_path / "adapter", **options)
    result = run("verify", tmp_path / "base", *mesh, "--adapter", tmp_path / "adapter", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["good"]
    assert found["adapter_different"] == []
    assert found["logits"]["relative"] < 1e-5
    if case == "llama":
        alone = run("verify", tmp_path / "base", "--json")
        assert json.loads(alone.stdout)["adapter_different"] is None
        told = run("verify", tmp_path / "base", "--adapter", tmp_path / "adapter").output
        assert "largest difference to peft" in " ".join(told.split())


@pytest.mark.skipif("qwen3_vl" not in towers.NAMES, reason="the installed transformers builds no towers")
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma4"])
def test_an_adapter_of_peft_in_a_tower_sees_an_image(name, tmp_path):
    """The first row has an image, and transformers asks for the types of its tokens."""
    folder = seeing.written(name, tmp_path / "base")
    config = peft.LoraConfig(r=3, lora_alpha=4, target_modules="all-linear", init_lora_weights=False)
    peft.get_peft_model(seeing.reference(folder), config).save_pretrained(tmp_path / "adapter")
    result = run("verify", folder, "--pp", 2, "--adapter", tmp_path / "adapter", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["tower"]
    assert found["adapter_different"] == []
    assert found["logits"]["images"] == 1
    assert found["logits"]["relative"] < 1e-5


def test_what_differs_is_named(tmp_path):
    tiny.random_checkpoint(tiny.config("llama"), tmp_path / "base", dtype=torch.bfloat16)
    message = refused(run("verify", tmp_path / "base", "--adapter", tmp_path / "base"))
    assert "expected adapter_config.json in" in message
