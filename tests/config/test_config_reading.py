"""read_config: published files, both spellings, the local cache, and one clear error for anything else."""

import os
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, LlamaConfig

from mcore_bridge.config.hf import read_config
from mcore_bridge.errors import ConfigError
from tests.support.families import FAMILIES, ROPES, Json, built, family, read, rope_of, spelling_4, spelling_5, write

PUBLISHED: dict[str, Json] = {  # fields of published config.json files, without sizes
    "Llama-2-7b-hf": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "pretraining_tp": 1,
        "rope_scaling": None,
        "torch_dtype": "float16",
        "transformers_version": "4.31.0.dev0",
        "_name_or_path": "meta-llama/Llama-2-7b-hf",
    },
    "Llama-3.1-8B-Instruct": {
        "model_type": "llama",
        "eos_token_id": [128001, 128008, 128009],
        "mlp_bias": False,
        "rope_theta": 5e5,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "rope_type": "llama3",
            "original_max_position_embeddings": 8192,
        },
    },
    "SmolLM2-135M": {
        "model_type": "llama",
        "is_llama_config": True,
        "rope_interleaved": False,
        "tie_word_embeddings": True,
        "rope_theta": 100000,
        "rope_scaling": None,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    },
    "Mistral-7B-v0.1": {
        "model_type": "mistral",
        "sliding_window": 4096,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
    },
    "Mistral-7B-v0.3": {"model_type": "mistral", "sliding_window": None, "rope_theta": 1000000.0},
    "Qwen2.5-7B": {
        "model_type": "qwen2",
        "use_mrope": False,
        "use_sliding_window": False,
        "sliding_window": 131072,
        "max_window_layers": 28,
        "rope_theta": 1000000.0,
    },
    "Qwen3-8B": {
        "model_type": "qwen3",
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 36,
        "head_dim": 128,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "attention_bias": False,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_accounted_for(name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 2}
    fields = PUBLISHED[name]
    hf = read({**sizes, **fields}, tmp_path)
    found = built(hf)
    assert found["rotary_base"] == fields.get("rope_theta", 10000.0)
    window = fields["sliding_window"] if fields["model_type"] == "mistral" else None
    assert found["window_size"] == repr(window and (window - 1, 0))


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("rope_type", ROPES)
def test_both_spellings_of_a_config_file_are_one_config(model_type: str, rope_type: str, tmp_path: Path) -> None:
    plain = {name: value for name, value in family(model_type).items() if "rope" not in name and name != "torch_dtype"}
    old = read({**plain, **spelling_4(rope_type)}, tmp_path / "4")
    new = read({**plain, **spelling_5(rope_type)}, tmp_path / "5")
    assert built(old) == built(new)
    assert rope_of(old) == rope_of(new)
    assert old.dtype == new.dtype == torch.bfloat16
    assert old.to_dict() | {"_name_or_path": ""} == new.to_dict() | {"_name_or_path": ""}


def test_a_config_object_in_the_other_spelling_is_translated(tmp_path: Path) -> None:
    plain = {name: value for name, value in family("llama").items() if "rope" not in name}
    new = CONFIG_MAPPING["llama"](**{**plain, **spelling_5("yarn")})
    assert rope_of(read_config(new)) == rope_of(read({**plain, **spelling_4("yarn")}, tmp_path))


def test_read_config_copies(tmp_path: Path) -> None:
    hf = read(family("llama"), tmp_path)
    copy = read_config(hf)
    assert copy.to_dict() == hf.to_dict()
    copy.num_hidden_layers = 99
    assert hf.num_hidden_layers == 4


def test_read_config_finds_the_local_cache_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    repository = tmp_path / "models--owner--name"
    write(repository / "snapshots" / "abc", family("qwen3"))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert read_config("owner/name").model_type == "qwen3"
    for name in ("owner/other", "/no/such/folder", "a/b/c", ""):
        with pytest.raises(ConfigError):
            read_config(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "must hold a config.json, found none"),
        ("{", "must be valid JSON"),
        (
            "version https://git-lfs.github.com/spec/v1\noid sha256:0",
            "is a pointer of git-lfs, .*`git lfs pull`",
        ),
        ("[]", "must hold a JSON object, found a list"),
        ("[" * 100_000, "must be valid JSON"),
        (f'{{"vocab_size": {"9" * 5000}}}', "must be valid JSON"),
        ('{"model_type": "llama", "model_type": "qwen2"}', r"expected each key once, found 1 twice: \['model_type'\]"),
        ("{}", "must name a model_type, found None"),
        ('{"model_type": "qwen33"}', "found 'qwen33'. Code inside a checkpoint is never run"),
        ('{"model_type": "llama", "rope_scaling": 3}', "refuses it"),
    ],
)
def test_a_bad_folder_is_one_clear_error(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("adapter_config.json", "found adapter_config.json: .*Give the folder of its base model"),
        ("model-Q4_K_M.gguf", "found model-Q4_K_M.gguf: GGUF files are not read. Give the release for transformers"),
        ("params.json", "found params.json: the original format"),
    ],
)
def test_a_folder_of_another_format_is_told_from_an_empty_one(file: str, message: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("auto", None), ("bf16", torch.bfloat16), ("fp32", torch.float32), ("torch.half", torch.half)],
)
def test_a_dtype_that_transformers_does_not_spell_so_is_read(
    dtype: str, expected: torch.dtype | None, tmp_path: Path
) -> None:
    """In an earlier version ``dtype="auto"`` built such models in bf16, whatever their files had."""
    config = read({**family("llama"), "torch_dtype": dtype}, tmp_path)
    assert config.dtype == expected


@pytest.mark.parametrize("dtype", ["nn", "float12", ""])
def test_a_dtype_that_torch_lacks_is_refused(dtype: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"dtype must name a dtype of torch, such as 'bfloat16', found '{dtype}'"):
        read({**family("llama"), "torch_dtype": dtype}, tmp_path)


def test_a_family_of_a_later_transformers_is_told_from_an_unknown_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen33"}')
    with pytest.raises(ConfigError, match=r"found 'qwen33', which is in later releases\. Update transformers"):
        read_config(tmp_path, known={"qwen33": ""})
    with pytest.raises(ConfigError, match=r"is in later releases\. Install transformers>=5\.17\.$"):
        read_config(tmp_path, known={"qwen33": "5.17"})
    (tmp_path / "config.json").write_text('{"model_type": "QWEN33"}')
    with pytest.raises(ConfigError, match=r"found 'QWEN33'\. Nearest names: qwen3\. Code inside"):
        read_config(tmp_path, known={"qwen3": ""})


def test_a_config_that_is_no_file_is_refused(tmp_path: Path) -> None:
    """A FIFO without a writer would block for ever; a folder is no config."""
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="is a FIFO, expected a file"):
        read_config(tmp_path)


def test_a_plugin_may_bring_the_class_of_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class OfAPlugin(LlamaConfig):  # type: ignore[misc]
        model_type = "of_a_plugin"

    monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", dict(CONFIG_MAPPING._extra_content))
    monkeypatch.setattr("mcore_bridge.config.hf.plugins", lambda: iter([AutoConfig.register("of_a_plugin", OfAPlugin)]))
    assert type(read({**family("llama"), "model_type": "of_a_plugin"}, tmp_path)) is OfAPlugin


def test_a_file_instead_of_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Give its folder"):
        read_config(write(tmp_path, family("llama")) / "config.json")
