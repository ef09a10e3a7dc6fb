"""The first name in ``architectures`` tells a whole model from a draft head, a reward model and another family."""

from pathlib import Path
from typing import Any

import pytest

import mcore_bridge as mb
from mcore_bridge.architecture import read_hf
from mcore_bridge.commands.draw import draw
from mcore_bridge.config.class_names import classes_in_transformers
from mcore_bridge.errors import ConfigError
from tests.support import composites as tiny
from tests.support.families import write

DRAFTS = (
    *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "EagleLlamaForCausalLM", "PEagleDraftModel"),
    *("DFlashDraftModel", "Qwen3DSparkModel", "DominoDraftModel", "MedusaModel", "Qwen3NextMTP", "MiMoMTPModel"),
    *("DeepseekV3ForCausalLMNextN", "MLPSpeculatorPreTrainedModel"),
)
"""Names that engines have for draft heads."""


def named(folder: Path, model_type: str, *names: str, **fields: Any) -> Path:
    return write(folder, {"model_type": model_type, "architectures": [*names], **fields})


@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_head_is_no_small_model(name: str, tmp_path: Path) -> None:
    """Whatever reads the config: a plan and a model without weights would be of the wrong model."""
    folder = named(tmp_path, "llama", name)
    for read in (read_hf, mb.to_transformer_config, lambda path: draw(path, tmp_path / "drawn")):
        with pytest.raises(ConfigError, match=rf"found architectures=\['{name}'\], which is of a draft head"):
            read(folder)


@pytest.mark.parametrize(
    "fields", [{"draft_vocab_size": 32000}, {"dflash_config": {"block_size": 16}}, {"eagle_config": {"a": 1}}]
)
def test_a_draft_head_with_the_class_of_its_target_is_told_by_its_fields(fields: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"found {next(iter(fields))}=.* of a draft head"):
        read_hf(named(tmp_path, "llama", "LlamaForCausalLM", **fields))


@pytest.mark.parametrize(
    ("model_type", "name", "message"),
    [
        (
            "qwen2",
            "Qwen2ForRewardModel",
            "a reward model.*head=.process_reward.* write Qwen2ForSequenceClassification there.* head='value'",
        ),
        ("mixtral", "MiniMaxM2ForCausalLM", "of 'mixtral' first .*MixtralForCausalLM.*contradicts the model_type"),
        ("kimi_k2", "LlamaForCausalLM", "of 'kimi_k2' first .DeepseekV3ForCausalLM.*contradicts"),
    ],
)
def test_a_class_of_another_model_is_refused(model_type: str, name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_hf(named(tmp_path, model_type, name))


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("llama", "LLaMAForCausalLM"),
        ("llama", "FSDPLlamaForCausalLM"),
        ("qwen2", "Qwen2ForTokenClassification"),
        ("cohere", "CohereForTokenClassification"),  # which we write, and transformers lacks
        ("qwen2", "Qwen2ForProcessRewardModel"),
        ("qwen3", "Qwen3Model"),
        ("qwen3", "ForTokenClassification"),  # which we write of a config without a class
        ("qwen2", "InternVLForConditionalGeneration"),  # the text of a composite
    ],
)
def test_classes_of_a_family_are_accepted_as_publishers_spell_them(model_type: str, name: str, tmp_path: Path) -> None:
    assert read_hf(named(tmp_path, model_type, name)).architectures == [name]
    assert read_hf(write(tmp_path, {"model_type": model_type})).architectures is None


@pytest.mark.skipif("kimi_k25" not in tiny.NAMES, reason="the installed transformers is too old")
def test_a_composite_and_its_text_are_read_too() -> None:
    hf = tiny.config("kimi_k25")
    hf.architectures = ["KimiK25ForConditionalGeneration"]
    assert read_hf(hf).architectures == hf.architectures
    hf.text_config.architectures = ["OurOwnTextForCausalLM"]
    assert read_hf(hf).text_config.architectures == ["OurOwnTextForCausalLM"]
    hf.text_config.architectures = ["DFlashDraftModel"]
    with pytest.raises(ConfigError, match="draft head"):
        read_hf(hf)
    hf.architectures, hf.text_config.architectures = ["LlavaForConditionalGeneration"], None
    with pytest.raises(ConfigError, match=r"of 'kimi_k25' first .*contradicts"):
        read_hf(hf)


def test_no_class_of_transformers_is_taken_for_a_draft_or_a_reward_model() -> None:
    """A family of transformers with such a name passes before the name is searched."""
    assert classes_in_transformers("llama") >= {"LlamaForCausalLM", "LlamaModel", "LlamaForSequenceClassification"}
    assert not any("Config" in name for name in classes_in_transformers("llama"))
