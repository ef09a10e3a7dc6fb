"""What a command reads is a folder, or a repository in the local hub cache; and its config is read first."""

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects

from tests.support import tiny
from tests.support.command import refused, run

COMMANDS = [
    ("verify", "--no-logits"),
    ("plan",),
    ("convert", "TARGET"),
    ("convert", "TARGET", "--to", "hf"),
    ("convert", "TARGET", "--to", "torch"),
    ("merge", "ADAPTER", "TARGET"),
    ("draw", "TARGET"),
]


def answer(command: tuple[str, ...], source: object, tmp_path: Path, *options: str) -> Any:
    (tmp_path / "adapter").mkdir(exist_ok=True)
    rest = [tmp_path / word.lower() if word.isupper() else word for word in command[1:]]
    return run(command[0], source, *rest, *options)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_config_is_judged_before_weights_are_looked_for(command: tuple[str, ...], tmp_path: Path) -> None:
    fields = json.loads(tiny.config("qwen3").to_json_string())
    texts = {
        "bloom": ("of a family that is written here", json.dumps(fields | {"model_type": "bloom"})),
        "awq": ("found 'awq'", json.dumps(fields | {"quantization_config": {"quant_method": "awq", "bits": 4}})),
        "misspelt": ("Nearest names: qwen3", json.dumps(fields | {"model_type": "qwen33"})),
        "broken": ("must be valid JSON", "{"),
    }
    any_family = command[0] == "draw" or "hf" in command  # these build no model of ours
    skipped = {"draw": {"bloom", "awq"}}.get(command[0], {"bloom", "misspelt"} if any_family else set())
    for name in texts.keys() - skipped:
        said, text = texts[name]
        (folder := tmp_path / name).mkdir()
        (folder / "config.json").write_text(text)
        assert said in refused(answer(command, folder, tmp_path)), name


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub with acme/tiny, whose config alone is in the local cache. ``snapshot_download`` completes the snapshot."""
    published, cached = tmp_path / "published", tmp_path / "cache" / "models--acme--tiny"
    tiny.random_checkpoint(tiny.config("qwen3"), published)
    snapshot = cached / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    shutil.copy(published / "config.json", snapshot)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")

    def fetch(name: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        for path in filter_repo_objects(
            published.iterdir(),
            allow_patterns=allow_patterns,
            ignore_patterns=ignore_patterns,
            key=lambda path: path.name,
        ):
            shutil.copy(path, snapshot)
        return str(snapshot)

    monkeypatch.delattr(huggingface_hub, "constants", raising=False)  # releases of 2.x have it only after an import
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda self, name: None)
    return snapshot


def test_every_command_takes_names_of_the_local_cache(hub: Path, tmp_path: Path) -> None:
    for command in COMMANDS:
        shutil.rmtree(tmp_path / "target", ignore_errors=True)
        assert "pass --download" in refused(answer(command, "acme/other", tmp_path))
        assert "Check the path." in refused(answer(command, tmp_path / "nothing", tmp_path, "--download"))
        result = answer(command, "acme/tiny", tmp_path)
        if command[0] in ("plan", "draw"):
            assert result.exit_code == 0, result.output
        else:
            assert "no *.safetensors: pass --download" in refused(result)
    (hub.parent.parent.parent.parent / "published" / "consolidated.safetensors").touch()
    result = run("verify", "acme/tiny", "--no-logits", "--download", "--against", "acme/tiny")
    assert result.exit_code == 0, result.output
    assert not (hub / "consolidated.safetensors").exists()
    target = tmp_path / "dist"
    assert run("convert", "acme/tiny", target).exit_code == 0
    assert run("convert", target, tmp_path / "back", "--hf", "acme/tiny").exit_code == 0


def test_a_download_that_cannot_be_says_so(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*arguments: object, **options: object) -> None:
        raise RuntimeError("Name or service\nnot known")

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", unreachable)
    said = refused(run("plan", "acme/tiny", "--download"))
    assert "cannot download acme/tiny from the hub: Name or service not known; check the name" in said
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refused(run("plan", "acme/tiny", "--download"))
