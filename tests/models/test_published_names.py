"""Names of tensors in published checkpoints: each belongs to a parameter or is left out for a reason, and none is
missing.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

import mcore_bridge as mb
from mcore_bridge.launch.fake_rank import rank_of
from mcore_bridge.rules.mapping import unstacked
from mcore_bridge.weights.bound import bind, provenance_on
from tests.support.published import FOLDER, expand
from tests.support.published import records as configs

RECORDS: list[dict[str, Any]] = [expand(record) for record in json.loads((FOLDER / "names.json").read_text())]
LEFT_OUT = {"qwen2_vl": ("visual.",), "qwen3_vl": ("model.visual.",)} | {
    "gemma3": ("vision_tower.", "multi_modal_projector.")
}
"""Prefixes of towers, which are not built. All other names are the text's, or of its MTP layers."""
WITH_MTP = {"mimo": {"mtp_num_layers": 1}}


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["name"])
def test_published_names_are_those_of_the_model(record: dict[str, Any], tmp_path: Path) -> None:
    names, model_type = record["names"], record["config"]["model_type"]
    if model_type not in CONFIG_MAPPING and model_type != "mimo":
        pytest.skip("the installed transformers lacks it")
    (tmp_path / "config.json").write_text(json.dumps(record["config"]))
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    dims = mb.ParallelDims()
    with rank_of(dims, 0, 1):
        asked: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta", "load_weights": False}
        models = mb.build_model(tmp_path, dims=dims, **asked, overrides=WITH_MTP.get(model_type))
        bound = bind(models, provenance_on(models, None, "lm"))
    used = {unstacked(name)[0] for mcore in bound.tensors for name in bound.mapping.bind(mcore).hf}
    assert used - set(names) == set()
    rest = [name for name in names if name not in used]
    mapping = bound.mapping
    assert [each for each in rest if not (mapping.is_not_built(each) or mapping.is_unused(each))] == []
    assert [each for each in rest if not each.startswith(LEFT_OUT.get(model_type, ()))] == []


def of_mtp_layer(name: str, folder: Path) -> tuple[set[str], int]:
    """The HF names in the MTP layer of a published config, which goes to ``folder``, and the number of its values."""
    (record,) = (each for each in configs() if each.name == name)
    if record.config["model_type"] not in CONFIG_MAPPING:
        pytest.skip("the installed transformers lacks it")
    (folder / "config.json").write_text(json.dumps(record.config))
    asked: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta", "load_weights": False}
    with rank_of(dims := mb.ParallelDims(), 0, 1):
        models = mb.build_model(folder, dims=dims, **asked, overrides={"num_layers": 2, "mtp_num_layers": 1})
        bound = bind(models)
    held = {name: tensor for name, tensor in bound.tensors.items() if name.startswith("mtp.")}
    names = {name for mcore in held for name in bound.mapping.bind(mcore).hf}
    return names, sum(tensor.numel() for tensor in held.values())


def test_a_published_file_of_mtp_layers_has_as_many_names_and_bytes(tmp_path: Path) -> None:
    """The last file of Nemotron 3.5 Lightning in bf16 has its MTP layer alone, and others have pinned its size.

    github pierre427/mlx2@dc9240c41d40, src/mlx2/adapters/nemotron35_lightning.py
    """
    num_names, num_bytes = 270, 2_670_685_240
    (record,) = (each for each in configs() if "Nemotron-3.5-Lightning" in each.name)
    names, num_values = of_mtp_layer(record.name, tmp_path)
    header = num_bytes - 2 * num_values
    assert len(names) == num_names
    assert 100 * num_names < header < 140 * num_names  # a name, a dtype, a shape and two offsets


def test_deepseek_v4_has_as_many_values_as_its_publisher_with_its_mtp_layer(tmp_path: Path) -> None:
    """All tensors of deepseek-ai/DeepSeek-V4-Flash@60d8d70770c6. Two values of four bits are one integer there."""
    of_all, of_mtp, scales, integers = 290_942_289_362, 1575, 3 * 256 + 3 + 5 + 2, 3 * 129280 * 6
    names, num_values = of_mtp_layer("deepseek-ai/DeepSeek-V4-Flash", tmp_path)
    assert len(names) == of_mtp - scales
    assert (mb.supports(tmp_path).parameters or 0) + num_values == of_all + integers
