"""The command on models with experts and MTP layers: its output, and its errors for wrong checkpoints."""

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mcore_bridge import Manifest, ParallelDims
from mcore_bridge.commands.verify.verify import _is_exported, _is_of_mtp
from mcore_bridge.rules.mapping import WeightMapping
from mcore_bridge.weights.provenance import mapping, provenance_of
from tests import zoo
from tests.support import mtp_checkpoints
from tests.support.command import refused, run
from tests.support.experts import HF
from tests.support.mtp import published
from tests.support.strategies import random_state, save

State = dict[str, torch.Tensor]
EXPERT = "model.layers.1.mlp.experts.{}.up_proj.weight"


def written(folder: Path, state: State) -> Path:
    save(state, HF, folder)
    return folder


def said(output: str) -> str:
    return " ".join(output.replace("\u2502", " ").split())


def test_verify_on_a_mesh_of_experts(tmp_path: Path) -> None:
    result = run("verify", written(tmp_path, random_state(HF)), "--tp", 2, "--ep", 2, "--sp")
    assert result.exit_code == 0, result.output
    assert "TP2 EP2 SP, DP1 EDP1, 2 ranks" in said(result.output)
    assert "bit by bit, on all 2 ranks" in said(result.output)
    assert "largest difference to transformers" in said(result.output)


def test_verify_of_a_family_that_transformers_lacks_in_files_of_one_dtype(tmp_path: Path) -> None:
    """Kimi K2 with router biases in bf16, which megatron-core holds in fp32: all is exact, without a reference."""
    hf = zoo.cases()["deepseek_v3"].hf
    save({name: tensor.bfloat16() for name, tensor in random_state(hf).items()}, hf, tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "kimi_k2"}))
    assert {spec.dtype for spec in Manifest.from_folder(tmp_path)} == {torch.bfloat16}
    result = run("verify", tmp_path, "--ep", 2)
    assert result.exit_code == 0, result.output
    assert "in fp32 in the model leave as the files have them: model.layers" in said(result.output)
    assert "e_score_correction_bias" in said(result.output)
    assert "no reference for logits" in said(result.output)


def remove_an_expert(state: State) -> None:
    state.pop(EXPERT.format(7))


def add_an_expert(state: State) -> None:
    state[EXPERT.format(8)] = state[EXPERT.format(0)].clone()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_an_expert, f"1 tensor missing ['{EXPERT.format(7)}']"),
        (add_an_expert, f"1 unexpected ['{EXPERT.format(8)}']"),
    ],
)
def test_verify_refuses_another_number_of_experts(
    tmp_path: Path, damage: Callable[[State], None], message: str
) -> None:
    state = random_state(HF)
    damage(state)
    found = refused(run("verify", written(tmp_path, state), "--no-logits"))
    assert message in found
    assert "Use the checkpoint of this config" in found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ep", 3], "--ep 3 must divide num_moe_experts=8 (the number of routed experts in the HF config)"),
        (["--etp", 3], "--etp 3 must divide moe_ffn_hidden_size=16 (moe_intermediate_size in the HF config)"),
        (["--mtp", 1], "--mtp must be at most 0, found 1"),
    ],
)
def test_plan_and_verify_refuse_meshes_that_do_not_fit(tmp_path: Path, options: list[object], message: str) -> None:
    folder = written(tmp_path, random_state(HF))
    assert message in refused(run("plan", folder, *options))
    if "--mtp" not in options:
        assert message in refused(run("verify", folder, *options))


WITH_MTP = zoo.params(("glm4_moe", "nemotron_h"))


@pytest.mark.parametrize("name", WITH_MTP)
def test_verify_with_mtp_layers_that_the_files_have(tmp_path: Path, name: str) -> None:
    hf, state = published(1, name)
    save({name: tensor.clone() for name, tensor in state.items()}, hf, tmp_path)
    result = run("verify", tmp_path, "--pp", 2, "--layout", "balanced", "--mtp", 1)
    assert result.exit_code == 0, result.output
    assert f"yes: {len(state)} tensors bit by bit" in said(result.output)
    assert "not used" not in result.output


@pytest.mark.parametrize("name", WITH_MTP)
def test_names_of_mtp_layers_are_ignored_drawn_or_compared(name: str) -> None:
    hf, state = published(1, name)
    own = {name for name in state if mtp_checkpoints.is_mtp(hf, name)}
    for built in (0, 1):
        rules = mapping(hf) if not built else _with_mtp(hf)
        assert {name for name in state if not _is_exported(rules, name)} == (set() if built else own)
    assert {name for name in state if _is_of_mtp(rules, name)} == own


def _with_mtp(hf: object) -> WeightMapping:
    return provenance_of(hf).mapping(tied=False, mtp=1)


def test_a_mesh_without_mtp_layers_places_none() -> None:
    dims = ParallelDims(pp=3, layout="Ettt|tm|L")
    assert dims.without_mtp().layout == "Ettt|t|L"
    assert ParallelDims(pp=2).without_mtp() == ParallelDims(pp=2)


def test_plan_shows_experts_and_mtp_layers(tmp_path: Path) -> None:
    """DeepSeek-V3 on 1024 ranks: 4 of 256 experts on each."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    picture = tmp_path / "plan.svg"
    options = ["--pp", 16, "--ep", 64, "--layout", "balanced", "--mtp", 1, "--picture", picture]
    result = run("plan", tmp_path, *options)
    assert result.exit_code == 0, result.output
    found = said(result.output)
    assert "684 B parameters in bfloat16: PP16 EP64, DP64 EDP1, 1024 ranks" in found
    assert "(TP1 CP1 DP64; of experts ETP1 EP64 DP1)" in found
    assert "4 of 256 in a layer" in found
    assert "60 M L" in found
    assert "46,183 HF tensors, 1.37 TB in all" in found
    cells = [title.text or "" for title in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}title")]
    assert sum(cell.startswith("layer ") for cell in cells) == 61
    assert sum(cell.startswith("mtp 0 ") for cell in cells) == 1


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
