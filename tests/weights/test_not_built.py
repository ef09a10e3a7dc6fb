"""Parts of a checkpoint that are not built: a save copies them unchanged, or its config counts 0 of them."""

import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mcore_bridge as mb
from mcore_bridge.config.hf import read_config
from mcore_bridge.errors import CheckpointError, ConfigError
from mcore_bridge.weights.files.hf_folder import Checkpoint
from tests import zoo
from tests.support import composites, fake_mesh, mtp_checkpoints, quantized
from tests.support.conversions import assert_exact, written
from tests.support.strategies import random_state, save

ONE = mb.ParallelDims()
COUNT = "num_nextn_predict_layers"
WITHOUT_RULES = {  # names of a family's MTP layers, some or all of which have no rules, and the field that counts them
    "hy_v3": (["model.layers.{layers}.eh_proj.weight", "model.layers.{layers}.shared_head.head.weight"], COUNT),
    "ernie4_5_moe": (["model.mtp_block.0.mlp.up_proj.weight", "model.mtp_emb_norm.0.weight"], COUNT),
    "step3p5": (
        ["model.layers.{layers}.eh_proj.weight", "model.layers.{layers}.transformer.shared_head.output.weight"],
        COUNT,
    ),
    "mellum": (["mtp.layers.0.mlp.up_proj.weight"], "mtp_num_hidden_layers"),
}
CASES = [name for name in dict.fromkeys((*mtp_checkpoints.CASES, *WITHOUT_RULES)) if name in zoo.cases()]


@pytest.fixture(autouse=True)
def alone() -> Any:
    with fake_mesh.rank_of(ONE, 0, 1):
        yield


OTHERS = {"deepseek_v4": ("mtp.0.emb.tok_emb.weight", "mtp.0.head.weight", "mtp.2.markov_head.markov_w1.weight")}
"""Names in published folders beside the names of a family's MTP layers: copies for engines, and a draft head."""


def source_of(
    name: str, folder: Path, dtype: torch.dtype = torch.bfloat16, others: Sequence[str] = (), **sizes: int
) -> tuple[Any, dict[str, Tensor], set[str]]:
    """A folder with MTP layers: its config, its tensors, and the names of tensors in MTP layers."""
    if name in WITHOUT_RULES:
        hf = zoo.cases()[name].hf
        patterns, count = WITHOUT_RULES[name]
        own = {pattern.format(layers=hf.num_hidden_layers) for pattern in patterns}
        state = random_state(hf, dtype=dtype) | {each: torch.randn(4, 32).to(dtype) for each in own}
    else:
        hf, count = mtp_checkpoints.config(name), COUNT if "qwen" not in name else "mtp_num_hidden_layers"
        hf.update(sizes)
        drawn = mtp_checkpoints.published(hf)
        kept = ("bias", "tid2eid")
        state = {each: t.clone() if each.endswith(kept) else t.to(dtype) for each, t in drawn.items()}
        own = {each for each in state if mtp_checkpoints.is_mtp(hf, each)} | {*others}
        state |= {each: torch.randn(4, 32).to(dtype) for each in others}
    setattr(hf, count, 1)
    written(state, hf, folder)
    return hf, state, own


def built(hf: Any, **options: Any) -> Any:
    return mb.build_model(hf, **{"dims": ONE, "dtype": torch.float32, "device": "cpu", **options})


def counts_in(folder: Path) -> list[int]:
    fields = json.loads((folder / "config.json").read_text())
    fields = fields.get("text_config", fields)
    return [fields[name] for name in (COUNT, "mtp_num_hidden_layers") if fields.get(name) is not None]


@pytest.mark.parametrize("name", CASES)
def test_mtp_layers_that_are_not_built_are_copied_or_dropped(name: str, tmp_path: Path, caplog: Any) -> None:
    """Other tensors have the dtype of the model, and are not copied. Engines get only trained tensors.

    In an earlier version a trained model could not be loaded with its MTP layers: these had the old embedding and head.
    """
    caplog.set_level(logging.WARNING)
    _, state, own = source_of(name, tmp_path / "source", others=OTHERS.get(name, ()))
    models = built(tmp_path / "source")
    assert not own & dict(mb.iter_hf_weights(models)).keys()
    assert set(mb.load_hf_weights(models, tmp_path / "source", dtype=torch.float32).not_built) == own
    with torch.no_grad():
        for parameter in models[0].parameters():
            parameter.add_(1)
    for fate in ("copied", "dropped"):
        mb.save_hf_checkpoint(models, tmp_path / fate, mtp=fate)
    saved, bare = (dict(Checkpoint(tmp_path / fate)) for fate in ("copied", "dropped"))
    assert saved.keys() == state.keys()
    assert bare.keys() == state.keys() - own
    mains = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    again = {each: main for end, main in mains.items() for each in own if each.endswith(f".{end}")}
    again = {each: main for each, main in again.items() if main in state and torch.equal(state[each], state[main])}
    assert len(again) == 2 * (name in ("glm4_moe", "deepseek_v3", "glm4_moe_lite"))
    assert all(torch.equal(saved[each], saved[main]) for each, main in again.items())
    if again:
        built(tmp_path / "copied", overrides={"mtp_num_layers": 1})  # which requires that they are equal
    own -= again.keys()
    assert all(saved[each].dtype == state[each].dtype and torch.equal(saved[each], state[each]) for each in own)
    assert (counts_in(tmp_path / "copied"), counts_in(tmp_path / "dropped")) == ([1], [0])
    assert f"{len(own)} tensors of MTP layers are copied" in caplog.text
    assert "=0 instead of 1" in caplog.text


@pytest.mark.skipif("deepseek_v3" not in CASES, reason="the installed transformers lacks it")
def test_a_copy_in_an_mtp_layer_that_has_another_dtype_stays(tmp_path: Path) -> None:
    """A save in place would lose bits of it otherwise."""
    hf, state, own = source_of("deepseek_v3", tmp_path / "source")
    (copy,) = (name for name in own if name.endswith("embed_tokens.weight"))
    state[copy] = state[copy].float()
    folder = written(state, hf, tmp_path / "other")
    mb.save_hf_checkpoint(built(folder, dtype=torch.bfloat16), folder)
    assert_exact(folder, state)


@pytest.mark.skipif("glm4_moe" not in CASES, reason="the installed transformers lacks it")
@pytest.mark.parametrize("how", ["overridden", "without a folder", "from a mapping", "vanished", "critic", "lost"])
def test_a_config_counts_no_mtp_layers_that_cannot_be_copied(how: str, tmp_path: Path) -> None:
    """Configs of another depth, and configs whose files are missing."""
    hf, state, own = source_of("glm4_moe", tmp_path / "source")
    source: Any = tmp_path / "source"
    options: dict[str, Any] = {}
    if how == "overridden":
        options = {"overrides": {"num_layers": hf.num_hidden_layers - 1}, "load_weights": False}
    elif how == "without a folder":
        source, options = hf, {"load_weights": False}
    elif how == "from a mapping":
        source, options = hf, {"load_weights": state}
    elif how == "critic":
        options = {"head": "value"}
    models = built(source, **options)
    if how == "vanished":
        shutil.rmtree(source)
        with pytest.raises(CheckpointError, match="folder that the model came from must be there"):
            mb.save_hf_checkpoint(models, tmp_path / "saved")
        source.mkdir()
    elif how == "lost":
        shutil.rmtree(source)
        written({name: tensor for name, tensor in state.items() if name not in own}, hf, source)
    mb.save_hf_checkpoint(models, tmp_path / "saved")
    assert not own & set(Checkpoint(tmp_path / "saved"))
    assert counts_in(tmp_path / "saved") == [0]


@pytest.mark.skipif("glm4_moe" not in CASES, reason="the installed transformers lacks it")
def test_a_model_that_was_built_from_a_config_copies_from_the_folder_that_it_loads(tmp_path: Path) -> None:
    """The save may be in place. If a source has more MTP layers than the model, the other MTP layers are copied."""
    hf = mtp_checkpoints.config("glm4_moe", 2)
    state = {name: tensor.clone() for name, tensor in mtp_checkpoints.published(hf, 2).items()}
    source = written(state, hf, tmp_path / "source")
    for number in (0, 1, 2):
        models = built(hf, load_weights=source, overrides={"mtp_num_layers": number or None})
        mb.save_hf_checkpoint(models, source)
        assert_exact(source, state)
        assert counts_in(source) == [2]
    with pytest.raises((CheckpointError, ConfigError), match="mtp must be 'copied' or 'dropped'"):
        mb.save_hf_checkpoint(models, source, mtp="gone")  # type: ignore[arg-type]


COUNTS = {"qwen3_5": "mtp_num_hidden_layers", "exaone4_5": COUNT}
VISIONS = [("qwen3_5", "text_only"), ("qwen3_5", "train"), ("exaone4_5", "text_only")]


@pytest.mark.skipif("qwen3_5" not in composites.NAMES, reason="the installed transformers lacks it")
@pytest.mark.parametrize(("name", "vision"), VISIONS)
def test_mtp_layers_of_a_composite_are_copied_with_its_tower_or_without(name: str, vision: str, tmp_path: Path) -> None:
    composites.written(name, tmp_path / "source")
    own = {"mtp.layers.0.mlp.up_proj.weight": torch.randn(4, 6), "mtp.fc.weight": torch.randn(4, 8)}
    state = dict(Checkpoint(tmp_path / "source")) | own
    hf = read_config(tmp_path / "source")
    setattr(hf.text_config, COUNTS[name], 1)
    save({name: tensor.clone() for name, tensor in state.items()}, hf, tmp_path / "source")
    models = built(tmp_path / "source", vision=vision)
    for fate, kept in {"copied": state, "dropped": {name: state[name] for name in state.keys() - own.keys()}}.items():
        mb.save_hf_checkpoint(models, tmp_path / fate, mtp=fate)  # type: ignore[arg-type]
        assert_exact(tmp_path / fate, kept)
        assert counts_in(tmp_path / fate) == [fate == "copied"]


QUANTIZED = [
    ("deepseek_v3", quantized.deepseek((16, 16))),
    ("deepseek_v4", quantized.deepseek_v4()),
    ("deepseek_v4", quantized.deepseek_v4_by_nvidia()),
]
IN_BLOCKS = {"deepseek_v4": {"hidden_size": 64, "moe_intermediate_size": 64}}
"""Sizes of families whose experts have scales of blocks."""


@pytest.mark.parametrize(("name", "form"), [case for case in QUANTIZED if case[0] in CASES])
def test_quantized_mtp_layers_are_copied_as_plain_ones(name: str, form: quantized.Format, tmp_path: Path) -> None:
    """If they are built, they are decoded."""
    hf, state, own = source_of(name, tmp_path / "source", **IN_BLOCKS.get(name, {}))
    hf.quantization_config = form.note
    shutil.rmtree(tmp_path / "source")
    written(form.files(state), hf, tmp_path / "source")
    models = built(tmp_path / "source", dtype=torch.bfloat16)
    mb.save_hf_checkpoint(models, tmp_path / "published", quantize="as_published")
    assert_exact(tmp_path / "published", form.files(state))
    mb.save_hf_checkpoint(models, tmp_path / "saved")
    decoded = form.decoded(state, torch.bfloat16)
    assert_exact(tmp_path / "saved", decoded)
    if not any("shared_head.head" in each for each in own):  # a quantized copy would differ from the head
        with_mtp = built(tmp_path / "source", dtype=torch.bfloat16, overrides={"mtp_num_layers": 1})
        exported = mb.to_hf_state_dict(with_mtp)
        assert exported.keys() == decoded.keys()
        assert [each for each in decoded if not torch.equal(exported[each], decoded[each])] == []
    assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()
    assert any(form.is_quantized(name, state[name]) for name in own)
    assert counts_in(tmp_path / "saved") == [1]
