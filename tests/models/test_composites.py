"""Composites: their text loads from published names and has transformers' logits. All other tensors are not built."""

import dataclasses
import functools
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft.tuners.tuners_utils import _maybe_include_all_linear_layers
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import mcore_bridge as mb
from mcore_bridge import architecture as registry
from mcore_bridge.architecture import architecture_of, composites
from mcore_bridge.commands.verify.logits import forward
from mcore_bridge.commands.verify.transformers_logits import why_no_reference
from mcore_bridge.config.class_names import model_class
from mcore_bridge.config.hf import read_config
from mcore_bridge.convert.convert import convert
from mcore_bridge.errors import CheckpointError, ConfigError
from mcore_bridge.factory.vision.tower import tower_specs
from mcore_bridge.launch.fake_rank import rank_of
from mcore_bridge.rules.adapters import all_linear
from mcore_bridge.rules.layout import FUSED_GATED_UP, Rearrange
from mcore_bridge.rules.mapping import pattern_of, respelled_name
from mcore_bridge.weights.peft.peft_config import PeftNames
from mcore_bridge.weights.peft.peft_folder import memory_prefixes
from mcore_bridge.weights.provenance import provenance_of
from tests.support import composites as tiny
from tests.support import pool, towers
from tests.support.bounds import BOUND, ONE
from tests.support.composites import assert_same
from tests.support.conversions import quiet
from tests.support.shared_jobs import results

MESHES = (mb.ParallelDims(tp=2, sp=True), mb.ParallelDims(pp=2))
EXPERTS = mb.ParallelDims(ep=2)


@pytest.mark.skipif("qwen3_vl" not in tiny.NAMES, reason="the installed transformers lacks it")
def test_a_composite_needs_the_folder_of_its_tower_to_come_back_to_hf(tmp_path: Path) -> None:
    tiny.written("qwen3_vl", tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "dist", on_event=quiet)
    with pytest.raises(CheckpointError, match="pass the HF folder that it was made from, with --hf"):
        convert(tmp_path / "dist", tmp_path / "back", on_event=quiet)
    convert(tmp_path / "dist", tmp_path / "back", hf=tmp_path / "hf", on_event=quiet)
    assert_same(tmp_path / "hf", tmp_path / "back")


def mesh_of(name: str) -> mb.ParallelDims:
    return EXPERTS if "moe" in name else MESHES[len(name) % 2]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Write a composite, and return the arguments of a rank that loads and saves it."""

    @functools.cache
    def write(name: str, dims: mb.ParallelDims) -> tuple[Path, mb.ParallelDims, Path, torch.Tensor]:
        folder = tmp_path_factory.mktemp(name)
        return folder / "source", dims, folder / "saved", tiny.written(name, folder / "source")

    return write


@pytest.mark.parametrize("name", tiny.NAMES)
def test_a_composite_is_text_that_computes_as_in_transformers_and_parts_that_are_not_built(
    name: str, written: Any
) -> None:
    """Load each on a mesh; the saved folder then has every tensor of the source, bit for bit, and an equal config.

    A config without a class gets the class of its ``model_type``.
    """
    dims = mesh_of(name)
    alike = [each for each in tiny.NAMES if mesh_of(each) == dims]
    errors = [error for error in results(tiny.load_save_and_compare, written, dims, name, alike) if error is not None]
    assert errors
    assert max(errors) < BOUND
    folder, _, saved, _ = written(name, dims)
    source = assert_same(folder, saved)
    fields = fields_of(folder)
    expected = fields["architectures"] or [model_class(fields["model_type"])]
    assert fields_of(saved) == fields | {"architectures": expected}
    assert why_no_reference(folder) == composites()[name].without_reference
    mapping = mb.mapping(folder)
    copied = [spec.name for spec in source if mapping.is_not_built(spec.name)]
    assert copied
    assert not any("language_model" in each or "text_model" in each or "embed_tokens" in each for each in copied)


@pytest.mark.skipif("qwen3_vl_moe" not in tiny.NAMES, reason="the installed transformers lacks it")
@pytest.mark.parametrize("square", [False, True])
def test_stacks_of_experts_load_in_either_orientation(square: bool, tmp_path: Path) -> None:
    """transformers 5 writes [experts, out, in], and publishers [experts, in, out]; one stack may be square."""
    size = tiny.TEXTS["qwen3_vl_moe_text"].hidden_size
    sizes = {"moe_intermediate_size": size} if square else {}
    reference = tiny.written("qwen3_vl_moe", tmp_path / "source", **sizes)
    state = load_file(tmp_path / "source" / "model.safetensors")
    stacks = [name for name in state if ".experts." in name]
    turned = {name: state[name].mT.contiguous() for name in stacks}
    if tiny.NEWEST:
        tiny.written("qwen3_vl_moe", tmp_path / "theirs", published=False, **sizes)
        theirs = load_file(tmp_path / "theirs" / "model.safetensors")
        assert all(torch.equal(theirs[name], tensor) for name, tensor in turned.items())
    shutil.copytree(tmp_path / "source", tmp_path / "turned")
    save_file({**state, **turned}, tmp_path / "turned" / "model.safetensors", metadata={"format": "pt"})
    (logits, *_) = pool.run(2, tiny.load_and_save, tmp_path / "turned", EXPERTS, tmp_path / "saved")
    assert (logits - reference).abs().max() < BOUND * reference.std()
    assert_same(tmp_path / "source", tmp_path / "saved")
    with rank_of(ONE, 0, 1):
        models = built(read_config(tmp_path / "source"), {**state, **turned})
        assert all(torch.equal(mb.to_hf_state_dict(models)[name], state[name]) for name in stacks)
        pairs = {**dict(sorted(state.items(), key=lambda pair: ".experts." in pair[0])), **turned}.items()
        other = built(read_config(tmp_path / "source"), False)
        mb.load_hf_weights(other, reversed(pairs))
        assert all(torch.equal(mb.to_hf_state_dict(other)[name], state[name]) for name in stacks)
        twice = [pair for pair in pairs if pair[0].endswith(".down_proj")][:1]
        with pytest.raises(CheckpointError, match=r"down_proj came twice"):
            mb.load_hf_weights(other, [*twice, *pairs])


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_a_text_that_keeps_the_names_of_its_composite_loads_and_is_saved_so(name: str, tmp_path: Path) -> None:
    """transformers writes such a folder if it has loaded only the text of a composite. Many fine-tuned models have
    it.
    """
    if name not in tiny.NAMES:
        pytest.skip("the installed transformers lacks it")
    tiny.written(name, tmp_path / "source")
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32).eval()
    text.save_pretrained(tmp_path / "text")
    names = {each.name for each in mb.Manifest.from_folder(tmp_path / "text")}
    assert "model.language_model.embed_tokens.weight" in names
    assert read_config(tmp_path / "text").model_type == f"{name}_text"
    with torch.no_grad():
        expected = text(tiny.tokens()).logits
    (logits, *_) = pool.run(
        2, tiny.load_and_save, tmp_path / "text", mb.ParallelDims(tp=2, sp=True), tmp_path / "saved"
    )
    assert (logits - expected).abs().max() < BOUND * expected.std()
    assert_same(tmp_path / "text", tmp_path / "saved")
    state = load_file(tmp_path / "text" / "model.safetensors")
    with rank_of(ONE, 0, 1):
        models = built(read_config(tmp_path / "text"), state)
        exported = mb.to_hf_state_dict(models)
    assert {each.removeprefix("model.") for each in exported} == {
        each.replace("model.language_model.", "") for each in state
    }


REMOTE = {
    "NemotronH_Nano_VL_V2": ("nemotron_h_omni", "llm_config"),
    "internvl_chat": ("internvl", "llm_config"),
    "kimi_vl": ("kimi_k25", "text_config"),
}
"""Composites that transformers lacks: one with an equal text and equal names, and the field with the text's config."""


@pytest.mark.parametrize("name", REMOTE)
def test_a_composite_that_transformers_lacks_is_read_and_written_by_its_published_names(
    name: str, tmp_path: Path
) -> None:
    """Its own fields and the config of its models of images are kept as they are."""
    other, field = REMOTE[name]
    if other not in tiny.NAMES:
        pytest.skip("the installed transformers lacks the other one")
    reference = tiny.written(other, tmp_path / "source")
    text = json.loads((tmp_path / "source" / "config.json").read_text())["text_config"]
    fields = {
        "model_type": name,
        "architectures": [f"{name}Model"],
        field: text,
        "vision_config": {"model_type": "of_published_code", "patch_size": 14},
        "torch_dtype": "float32",
        "auto_map": {"AutoConfig": "configuration.Config"},
    }
    (tmp_path / "source" / "config.json").write_text(json.dumps(fields))
    (logits, *_) = filter(
        lambda x: x is not None, pool.run(2, tiny.load_and_save, tmp_path / "source", MESHES[0], tmp_path / "saved")
    )
    assert (logits - reference).abs().max() < BOUND * reference.std()
    assert_same(tmp_path / "source", tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert {each: saved[each] for each in ("model_type", "architectures", "vision_config", "auto_map")} == {
        each: fields[each] for each in ("model_type", "architectures", "vision_config", "auto_map")
    }
    assert saved[field]["hidden_size"] == text["hidden_size"]
    assert field == "text_config" or "text_config" not in saved
    with pytest.raises(ConfigError, match=f"vision must be 'text_only' for {name}"), rank_of(ONE, 0, 1):
        mb.build_model(tmp_path / "saved", dims=ONE, device="meta", vision="frozen")


IN_MEMORY = (("language_model.model.", "model.language_model."), ("language_model.lm_head.", "lm_head."))
TWICE = (("language_model.model.", "language_model.model.model."),)


def respelled_folder(source: Path, folder: Path, spelling: Any) -> Path:
    """A copy of the composite with other names of its text."""
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    state = {respelled_name(name, spelling): tensor for name, tensor in load_file(file).items()}
    save_file(state, file, metadata={"format": "pt"})
    return folder


def built(hf: Any, folder: Path) -> Any:
    """One rank's model, built from ``hf`` and loaded from ``folder``."""
    return mb.build_model(hf, dims=ONE, dtype=torch.float32, device="cpu", load_weights=folder)


def test_a_composite_keeps_its_spelling_its_ties_and_what_overrides_say(tmp_path: Path) -> None:
    """The model comes from a config alone, a folder with other prefixes, and a checkpoint of megatron-core.

    transformers 5.17 has the names in ``model`` in memory, and writes ``model`` twice for composites of sound.
    """
    tiny.written("mistral3", tmp_path / "source")
    other = respelled_folder(tmp_path / "source", tmp_path / "other", IN_MEMORY)
    twice = respelled_folder(tmp_path / "source", tmp_path / "twice", TWICE)
    hf = read_config(tmp_path / "source")
    assert not hf.tie_word_embeddings
    with rank_of(ONE, 0, 1):
        models = built(hf, other)
        names = set(mb.to_hf_state_dict(models))
        assert "model.language_model.embed_tokens.weight" in names
        mb.save_hf_checkpoint(models, tmp_path / "saved")
        assert_same(tmp_path / "saved", other)
        mb.save_hf_checkpoint(built(hf, twice), tmp_path / "saved twice")
        assert_same(tmp_path / "saved twice", twice)
        assert models[0].bridge.config.model_type == "mistral3"
        assert_format_noted(tmp_path / "experts")
        larger = mb.build_model(hf, dims=ONE, device="cpu", overrides={"rotary_base": 5e5}, load_weights=False)
    assert_theta(larger[0].bridge.config.text_config, 5e5)
    convert(tmp_path / "source", tmp_path / "dist", on_event=quiet)
    convert(tmp_path / "dist", tmp_path / "back", hf=tmp_path / "source", on_event=quiet)
    assert_same(tmp_path / "back", tmp_path / "source")


def assert_format_noted(folder: Path) -> None:
    """A model from a config exports experts as in the folder: all in one tensor, or one tensor for each."""
    if "qwen3_5_moe" not in tiny.NAMES:
        return
    tiny.written("qwen3_5_moe", folder)
    models = built(hf := read_config(folder), folder)
    other = {"fused": "split", "split": "fused"}[models[0].bridge.expert_format]
    mb.save_hf_checkpoint(models, folder / "other", expert_format=other)
    assert built(hf, folder / "other")[0].bridge.expert_format == other


def assert_theta(text: Any, theta: float) -> None:
    """Check the base of the rope in a config, in either of two spellings."""
    assert (getattr(text, "rope_parameters", None) or {"rope_theta": text.rope_theta})["rope_theta"] == theta


def test_a_text_that_is_tied_by_the_composite_is_tied(tmp_path: Path) -> None:
    """transformers 5 reads the composite's field, 4.57 the text's; a folder without a head is tied as well."""
    reference = tiny.written("gemma3", tmp_path, tie_word_embeddings=True)
    with rank_of(ONE, 0, 1):
        (model,) = built(tmp_path, tmp_path)
        assert model.share_embeddings_and_output_weights
        assert not any("lm_head" in name for name in mb.to_hf_state_dict([model]))
    assert reference.isfinite().all()


def test_what_is_not_accounted_for_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A field of the composite that transformers reads, a tensor among the text's, and parts that nobody can carry."""
    tiny.written("llava", tmp_path / "source")
    fields = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps({**fields, "init_std": 3, "an_extra": 1}))
    with pytest.raises(ConfigError, match="'llava' does not know init_std=3"):
        mb.to_transformer_config(tmp_path / "source")
    (tmp_path / "source" / "config.json").write_text(json.dumps({**fields, "an_extra": 1}))
    with pytest.raises(ConfigError, match="found 'llava', which joins a text to models of images or sound"):
        architecture_of("llava")
    with pytest.raises(ConfigError, match="found an_extra=1"):
        mb.to_transformer_config(tmp_path / "source", strict_config=True)
    with rank_of(ONE, 0, 1):
        state = load_file(tmp_path / "source" / "model.safetensors")
        models = mb.build_model(read_config(tmp_path / "source"), dims=ONE, device="cpu", load_weights=state)
        with caplog.at_level(logging.WARNING, logger="mcore_bridge"):
            mb.save_hf_checkpoint(models, tmp_path / "text")
        assert "the other parts of this llava are not saved" in caplog.text
        with pytest.raises(CheckpointError, match=r"unexpected.*language_model.model.layers.0.extra"):
            mb.load_hf_weights(models, {**state, "language_model.model.layers.0.extra": torch.zeros(1)})


ALTERNATING = ("mlp.linear_fc1.weight", "mlp.experts.*.linear_fc1.weight", "shared_experts.gate_up")


@pytest.mark.skipif("inkling_mm_model" not in tiny.NAMES, reason="the installed transformers lacks it")
def test_rows_of_gates_alternate_in_files_of_inkling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules with gates before all that they multiply are planted for one kind of MLP at a time.

    A folder of adapters would have other modules than ``peft`` finds.
    """
    reference = tiny.written("inkling_mm_model", tmp_path)
    own = composites()["inkling_mm_model"]

    def with_blocks(suffix: str) -> Any:
        one = Rearrange("shared n m", "n shared m") if suffix.endswith("gate_up") else None
        blocks = FUSED_GATED_UP if one is None else one >> FUSED_GATED_UP
        return lambda hf: tuple(
            dataclasses.replace(rule, layout=blocks) if rule.mcore.endswith(suffix) else rule for rule in own.rules(hf)
        )

    for rules in (own.rules, *map(with_blocks, ALTERNATING)):
        monkeypatch.setitem(registry._COMPOSITES, "inkling_mm_model", dataclasses.replace(own, rules=rules))
        with rank_of(ONE, 0, 1):
            models = built(read_config(tmp_path), tmp_path)
            error = (forward(models, ONE, tiny.tokens()) - reference).abs().max() / reference.std()
            assert (error < BOUND) == (rules is own.rules), rules
    with rank_of(ONE, 0, 1):
        models = built(read_config(tmp_path), tmp_path)
        mb.add_adapters(models, targets=["linear_qkv"], rank=2, alpha=4)
        with pytest.raises(CheckpointError, match="whose files have others"):
            mb.save_hf_adapters(models, tmp_path / "adapters")


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="names in memory are those of transformers 5")
def test_adapters_have_the_names_of_modules_in_the_memory_of_transformers():
    """In the text and in the tower, where ``peft`` finds the linear layers that get adapters here."""
    differ = {}
    for name, composite in composites().items():
        if name not in CONFIG_MAPPING or composite.in_memory is None or tiny.lacks_tower(hf := tiny.config(name)):
            continue
        with torch.device("meta"):
            model = tiny.model_class(name)(hf)
        provenance = provenance_of(hf)
        if name in towers.NAMES:
            provenance = provenance.seeing("frozen", tower_specs(provenance.whole, torch.float32))
        (_, prefix), *_ = memory_prefixes(provenance)
        modules = [module for module, _ in model.named_modules()]
        if not any(module.startswith(f"{prefix}layers.0.") for module in modules):
            differ[name] = prefix
        if name in towers.NAMES:
            wanted = _maybe_include_all_linear_layers(peft.LoraConfig(target_modules="all-linear"), model)
            theirs = {pattern_of(module) for module in wanted.target_modules if not module.startswith(prefix)}
            rules = [rule for rule in provenance.mapping(tied=False).rules if rule.mcore.startswith("vision.")]
            naming = PeftNames(memory=memory_prefixes(provenance))
            ours = set(map(naming.in_memory, all_linear(rules)))
            if theirs - ours != OF_PEFT.get(name, set()) or not ours <= theirs or not ours:
                differ[name] = str(theirs ^ ours)
    assert differ == {}


OF_PEFT = {
    "gemma3": {"model.vision_tower.head.attention.out_proj"},
    "kimi_k25": {f"model.vision_tower.layers.*.attn.{part}_proj" for part in "qkv"},
    "qwen2_5_omni": {"thinker.lm_head"},
    "qwen3_omni_moe": {"thinker.lm_head"},
}
"""Further layers that ``peft`` finds: one whose weight torch's attention reads, layers that files join, and heads."""


def test_a_head_dim_that_the_text_computes_anyway_is_accepted() -> None:
    """A flat config has it beside the fields of the text, and transformers does not pass it on."""
    hf = tiny.config("qwen2_5_vl")
    size = hf.text_config.hidden_size // hf.text_config.num_attention_heads
    hf.head_dim = size
    assert mb.to_transformer_config(hf).kv_channels == size
    hf.head_dim = 2 * size
    with pytest.raises(
        ConfigError, match=f"does not know head_dim={2 * size}|head_dim must be {size}, .* found {2 * size}"
    ):
        mb.to_transformer_config(hf)


def test_a_vocabulary_that_was_resized_is_that_of_the_text() -> None:
    """transformers' ``resize_token_embeddings`` leaves the old number in the composite."""
    for hf in map(tiny.config, ("voxtral", "llava")):
        hf.vocab_size = hf.text_config.vocab_size + 8
        assert mb.supports(hf)


def fields_of(folder: Path) -> dict[str, Any]:
    """A config as transformers reads it, without the fields that name the writer."""
    return _without_writer(read_config(folder).to_dict())


def _without_writer(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _without_writer(value) if isinstance(value, dict) else value
        for name, value in fields.items()
        if name not in ("_name_or_path", "transformers_version")
    }
