"""How a trainer is made to use this library: the setting that its user writes, and no change without it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

VERL = """
import importlib, os
from importlib.metadata import entry_points

for name in filter(None, os.getenv("VERL_USE_EXTERNAL_MODULES", "").split(",")):
    importlib.import_module(name)
for each in entry_points(group="verl.plugins"):
    try:
        each.load()
    except Exception:
        pass
"""
"""The steps of verl 0.9.1 when it is imported."""
ASK = """
import sys
import verl
assert not {"torch", "transformers", "megatron.core"} & sys.modules.keys(), "taking a place is light"
try:
    from verl.models.mcore.mbridge import AutoBridge, freeze_moe_router, make_value_model
    from verl.models.mcore.bridge import AutoBridge, freeze_moe_router, make_value_model
    from megatron.bridge.training.utils.config_utils import create_ddp_config
    print(AutoBridge.__module__)
except ImportError as error:
    print(repr(error))
"""


def python(script: str, site: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = {"PYTHONPATH": f"{site}:{ROOT}", "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], env={**path, **environment}, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Packages with the files in which verl and siiRL import a bridge, and their earlier imports."""
    folder = tmp_path_factory.mktemp("site")
    for name in ("verl", "siirl"):
        inner = folder / name / "models" / "mcore"
        inner.mkdir(parents=True)
        (folder / name / "__init__.py").write_text(VERL if name == "verl" else "")
        (inner / "mbridge.py").write_text("from mbridge import AutoBridge\n")
        (inner / "registry.py").write_text("def hf_to_mcore_config(hf_config, dtype): ...\n\n\ntheirs = 'kept'\n")
    return folder


def test_verl_uses_us_where_it_is_told_to(site):
    found = python(ASK, site, VERL_USE_EXTERNAL_MODULES="mcore_bridge.trainers.verl")
    assert found.stdout == "mcore_bridge.trainers.megatron_bridge\n", found.stderr


def test_verl_does_not_use_us_otherwise(site):
    found = python(ASK, site)
    assert "No module named 'mbridge'" in found.stdout, found.stderr


def test_siirl_uses_us_where_it_is_told_to(site):
    ask = "from siirl.models.mcore.mbridge import __doc__ as found\nprint(found)"
    assert python(f"import mcore_bridge.trainers.siirl\n{ask}", site).stdout.startswith(
        "mcore_bridge.trainers.mbridge,"
    )
    assert "No module named 'mbridge'" in python(ask, site).stderr


def test_it_says_so_when_it_comes_too_late(site):
    script = (
        "import sys, types\n"
        "sys.modules['verl.models.mcore.bridge'] = theirs = types.ModuleType('theirs')\n"
        "try:\n"
        "    import mcore_bridge.trainers.verl\n"
        "except Exception as error:\n"
        "    assert sys.modules['verl.models.mcore.bridge'] is theirs\n"
        "    assert 'verl.models.mcore.mbridge' not in sys.modules\n"
        "    print(type(error).__name__, error)\n"
    )
    found = python(script, site)
    assert found.stdout.startswith("ConfigError verl.models.mcore.bridge must not have been imported"), found.stderr


def test_an_installed_megatron_bridge_keeps_what_is_beside_ours(site, tmp_path):
    """The package's config.py imports from the replaced module, while the package is imported."""
    training = tmp_path / "megatron" / "bridge" / "training"
    (training / "utils").mkdir(parents=True)
    for package in (training, training.parent, training / "utils"):
        (package / "__init__.py").touch()
    (training / "__init__.py").write_text("from megatron.bridge.training.config import Config\n")
    (training / "config.py").write_text(
        "from megatron.bridge.training.utils.config_utils import Base\n\n\nclass Config(Base): ...\n"
    )
    (training / "utils" / "config_utils.py").write_text("class Base: ...\n\n\ndef create_ddp_config(): ...\n")
    script = (
        f"import sys\nsys.path.append({str(tmp_path)!r})\n"
        "import verl\n"
        "from megatron.bridge.training.config import Config\n"
        "from megatron.bridge.training.utils.config_utils import create_ddp_config\n"
        "print(Config.__mro__[1].__module__, create_ddp_config.__module__)\n"
    )
    found = python(script, site, VERL_USE_EXTERNAL_MODULES="mcore_bridge.trainers.verl")
    ours = "megatron.bridge.training.utils.config_utils mcore_bridge.trainers.megatron_bridge\n"
    assert found.stdout == ours, found.stderr


def test_adapters_are_ours_where_megatron_bridge_is_asked_for_them(site):
    script = (
        "import types\n"
        "import verl\n"
        "from verl.workers.config.megatron_peft import get_peft_cls\n"
        "from megatron.bridge.peft.utils import create_peft_hook, load_peft_adapter_checkpoint\n"
        "from megatron.bridge.training.checkpointing import apply_peft_adapter_filter_to_state_dict\n"
        "for lora in ({}, {'rank': 0}, {'rank': 8}):\n"
        "    print(get_peft_cls(types.SimpleNamespace(lora=lora), bridge=None, provider=1, dtype=None))\n"
        "print(create_peft_hook.__module__, apply_peft_adapter_filter_to_state_dict.__module__)\n"
    )
    found = python(script, site, VERL_USE_EXTERNAL_MODULES="mcore_bridge.trainers.verl")
    assert found.stdout.startswith("None\nNone\nPeft(dim=8, alpha=32, kind='shared'"), found.stderr
    assert found.stdout.endswith("mcore_bridge.trainers.peft_functions mcore_bridge.trainers.peft_functions\n")


def test_verl_without_a_bridge_is_refused_and_what_is_beside_it_stays(site):
    script = (
        "import verl\n"
        "from verl.models.mcore.registry import hf_to_mcore_config, theirs\n"
        "try:\n"
        "    hf_to_mcore_config(None, None)\n"
        "except Exception as error:\n"
        "    print(theirs, type(error).__name__, error)\n"
    )
    found = python(script, site, VERL_USE_EXTERNAL_MODULES="mcore_bridge.trainers.verl")
    assert found.stdout.startswith("kept ConfigError verl's hf_to_mcore_config is not served"), found.stderr
    assert python(script, site).stdout == ""
