"""Adapters of composites with a tower: ``peft``'s log-probs, gradients and merged weights for rows with images."""

from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import mcore_bridge as mb
from mcore_bridge.convert.convert import merge
from mcore_bridge.errors import ConfigError
from mcore_bridge.launch.fake_rank import rank_of
from mcore_bridge.trainers.peft_functions import create_peft
from tests.support import composites, pool, seeing, seeing_adapters
from tests.support.bounds import ONE
from tests.support.composites import assert_same
from tests.support.conversions import quiet
from tests.support.peft_models import fill

pytestmark = pytest.mark.skipif("qwen3_5" not in composites.NAMES, reason="the installed transformers lacks it")
BOUND = 3e-5
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TEXT = {"targets": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]}
CASES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "qwen3_vl": (
        {},
        [({"tp": 2, "sp": True}, {"overrides": RECOMPUTED}), ({"cp": 2}, {"bare": True}), ({}, {"overlap": True})],
    ),
    "qwen3_vl text": (TEXT, [({"tp": 2, "sp": True}, {"overrides": RECOMPUTED})]),
    "gemma3": ({"dora": True}, [({"pp": 2}, {}), ({"tp": 2, "sp": True}, {"recompute": True})]),
    "gemma4": ({}, [({"pp": 2}, {})]),
    "qwen2_5_vl": ({"targets": ["qkv", "q_proj", "merger.mlp.*"]}, [({"tp": 2}, {})]),
}
"""For each family the arguments of ``add_adapters``, and meshes of two ranks with options of ``step``."""


@cache
def written(name: str) -> Path:
    return seeing.written(name, Path(mkdtemp()))


def errors(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """The largest difference of each tensor, relative to its largest element.

    A gradient under 1e-5 of the largest one is noise: queries whose keys are nearly equal have such gradients.
    """
    assert found.keys() == wanted.keys()
    sizes = {name: float(tensor.abs().max()) for name, tensor in wanted.items()}
    least = 1e-5 * max(sizes.values())
    return {name: float((found[name] - wanted[name]).abs().max()) / max(sizes[name], least) for name in wanted}


@pytest.mark.parametrize("name", CASES)
def test_a_step_with_images_is_that_of_peft(name: str, tmp_path: Path) -> None:
    folder, (options, cases) = written(name.split()[0]), CASES[name]
    adapter = tmp_path / "adapter"
    pool.run(1, seeing_adapters.made, folder, adapter, options)
    batch = seeing.batch_of(seeing.reference(folder))
    log_probs, grads, merged = seeing_adapters.expected(folder, adapter, batch)
    assert any("vis" in key for key in grads) == (name != "qwen3_vl text")
    batch, theirs = (*batch, log_probs), tmp_path / "theirs"
    for found in zip(*pool.run(2, seeing_adapters.steps, folder, theirs, cases, batch), strict=True):
        for step in found:
            assert float((step["log_probs"] - log_probs[step["rows"]]).abs().max()) < BOUND
            wrong = errors(step["grads"], grads)
            assert max(wrong.values()) < BOUND, {key: error for key, error in wrong.items() if error > BOUND}
    if name == "qwen3_vl":
        for step in pool.run(2, seeing_adapters.mistaken, folder, adapter, batch):
            wrong = errors(step["grads"], grads)
            assert {key for key, error in wrong.items() if error > BOUND} == {key for key in grads if "visual" in key}
    assert_same(adapter, theirs)
    merge(folder, theirs, tmp_path / "again", on_event=quiet)
    assert_same(tmp_path / "merged", tmp_path / "again")
    assert max(errors(seeing.reference(tmp_path / "merged").state_dict(), merged).values()) < 1e-6


def refused(models: Any, targets: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        mb.add_adapters(models, rank=1, alpha=1, targets=targets)
    return str(caught.value)


def test_what_cannot_have_adapters_in_a_tower_is_refused() -> None:
    with rank_of(ONE, 0, 1):
        text = 'adapters freeze all other parameters: build with vision="frozen"'
        assert text in refused(seeing.built(written("qwen3_vl"), ONE), ["q_proj"])
        chunks = seeing.built(written("qwen3_vl"), ONE, vision="frozen")
        said = refused(chunks, ["patch_embed.proj", "merger.norm", "attn.qkw"])
        other = "is a layer of MTP, or no linear layer of a model of images"
        for part in (f"'patch_embed.proj' {other}", f"'merger.norm' {other}", "'attn.qkw' matches no module"):
            assert part in said
        batch = seeing.batch_of(seeing.reference(written("qwen3_vl")))
        run = partial(mb.forward, chunks, *batch[:2], images=batch[2])
        base = run().log_probs
        made = mb.add_adapters(chunks, rank=1, alpha=1, targets=["linear_fc1"])  # a tower has this name, too
        assert all(name.startswith("decoder.") for name in made.names)
        made = mb.add_adapters(chunks, rank=1, alpha=1, targets=["visual.blocks.*.mlp.linear_fc1"], name="tower")
        assert {name.partition(".mlp.")[2] for name in made.names} == {
            "linear_fc1.adapter.linear_in.weight",
            "linear_fc1.adapter.linear_out.weight",
        }
        assert all(name.startswith("vision.visual.blocks.") for name in made.names)
        (other,) = create_peft({"type": "canonical_lora", "rank": 1, "target_modules": ["linear_fc1_up"]})(
            seeing.built(written("qwen3_vl"), ONE, vision="frozen")
        )
        assert all(".mlp.linear_fc1." in name for name in other.bridge_adapters.names)
        fill(chunks, made)
        assert not torch.allclose(run().log_probs, base)
        with mb.without_adapters(chunks):
            assert torch.equal(run().log_probs, base)
        assert torch.equal(run(adapters=["default", None] * 2).log_probs, base)  # B of this set is zero


@pytest.mark.parametrize("name", ["kimi_k25"])
def test_layers_that_files_join_have_no_adapter(name: str, tmp_path: Path) -> None:
    """transformers has separate layers for queries, keys and values, which read the rows of one weight."""
    composites.written(name, tmp_path / "source")
    with rank_of(ONE, 0, 1):
        chunks = seeing.built(tmp_path / "source", ONE, vision="frozen")
        assert "'wqkv' is a layer of MTP, or no linear layer" in refused(chunks, ["wqkv"])
        mb.add_adapters(chunks, rank=1, alpha=1, targets="all-linear")
        written = mb.save_hf_adapters(chunks, tmp_path / "adapter")
        assert mb.load_adapters(chunks, tmp_path / "adapter").num_tensors == len(written)
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    names = {key.partition("vision_tower.")[2] for key in saved}
    assert {"layers.0.attn.proj.lora_A.weight", "layers.0.mlp.fc1.lora_B.weight"} < names
