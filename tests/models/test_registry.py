"""The registry has our architectures and those that users add. An unknown name raises, with similar names."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_bridge import architecture as registry
from mcore_bridge.architecture import Architecture, architecture_of, architectures, register
from mcore_bridge.errors import ConfigError
from mcore_bridge.installed import GROUP

PLUGIN = """
from dataclasses import replace
from mcore_bridge.architecture import architecture_of
ONE = replace(architecture_of("llama"), model_type="plugin_one", aliases=("plugin_uno",))
MANY = [replace(ONE, model_type=f"plugin_{n}", aliases=()) for n in (2, 3)]
WRONG = "not an architecture"
"""


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry is restored after each test."""
    architectures()
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))


def _distribution(folder: Path, *lines: str) -> Path:
    """An installed distribution like pip's: a module and its entry points."""
    info = folder / "plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join((f"[{GROUP}]", *lines)))
    (folder / "plugin_of_a_test.py").write_text(PLUGIN)
    return folder


def test_ours_are_found() -> None:
    assert set(architectures()) >= {"llama", "mistral", "qwen2", "qwen3", "phi3"}
    for model_type, architecture in architectures().items():
        assert architecture_of(model_type) is architecture
        assert model_type in (architecture.model_type, *architecture.aliases)


def test_an_unknown_model_type_is_told_the_nearest_names() -> None:
    with pytest.raises(ConfigError, match=r"'qwen_3'\. Nearest names: qwen3, qwen3_5, qwen2"):
        architecture_of("qwen_3")
    with pytest.raises(ConfigError, match=r"found 'zzz'\. Register an architecture"):
        architecture_of("zzz")


def test_register_adds_an_architecture_and_its_aliases() -> None:
    own = dataclasses.replace(architecture_of("llama"), model_type="own", aliases=("owned",))
    assert register(own) is register(own) is architecture_of("own") is architecture_of("owned")


def test_a_name_is_registered_once() -> None:
    usurper = dataclasses.replace(architecture_of("llama"), model_type="own", aliases=("qwen3",))
    with pytest.raises(ConfigError, match="'qwen3' is registered already"):
        register(usurper)
    with pytest.raises(ConfigError, match="'own'"):
        architecture_of("own")


def test_entry_points_are_looked_up_on_the_first_unknown_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _distribution(tmp_path, "one = plugin_of_a_test:ONE", "many = plugin_of_a_test:MANY")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "plugin_of_a_test", raising=False)
    architecture_of("qwen3")
    assert "plugin_of_a_test" not in sys.modules
    assert architecture_of("plugin_uno").model_type == "plugin_one"
    assert "plugin_of_a_test" in sys.modules
    assert {"plugin_2", "plugin_3"} <= set(architectures())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bad = plugin_of_a_test:WRONG", "must give an Architecture"),
        ("bad = plugin_of_a_test:NOTHING", "must load, but raises: AttributeError"),
        ("bad = plugin_that_is_not_there:ONE", "must load, but raises: ModuleNotFoundError"),
    ],
)
def test_a_broken_entry_point_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, message: str
) -> None:
    monkeypatch.syspath_prepend(_distribution(tmp_path, line))
    with pytest.raises(ConfigError, match=message):
        architecture_of("plugin_one")


def test_an_architecture_is_cheap_to_declare() -> None:
    """The registry imports neither megatron-core nor transformers, which take seconds."""
    code = (
        "import sys; from mcore_bridge.architecture import architectures; assert len(architectures()) >= 4; "
        "assert not {'megatron.core', 'transformers'} & set(sys.modules), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_four_families_are_small() -> None:
    for model_type in ("llama", "mistral", "qwen2", "qwen3"):
        path = Path(registry.__file__).parent / "models" / f"{model_type}.py"
        assert len(path.read_text().splitlines()) <= 30


def test_architecture_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        architecture_of("llama").model_type = "other"  # type: ignore[misc]
    assert dataclasses.fields(Architecture)[0].name == "model_type"
