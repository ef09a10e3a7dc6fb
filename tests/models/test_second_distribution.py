"""An outside package adds an architecture by its entry point alone: it is built, loaded and exported right, on any
mesh.
"""

import json
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "second_distribution"

USE = """
import sys
import torch
import torch.distributed as dist
import mcore_bridge as mb
from mcore_bridge.weights.load import load_hf_weights
from tests.support import fake_mesh
from tests.support.parity import reference_logits, worst_differences
from tests.support.strategies import random_state
from mcore_bridge.config.hf import read_config

assert "acme_models" not in sys.modules
hf = read_config(sys.argv[1])
state = random_state(hf)
assert "model.layers.1.input_layernorm.gain" in state
for dims in (mb.ParallelDims(tp=2, pp=2, sp=True), mb.ParallelDims(pp=2, layout="Et|tttL"), mb.ParallelDims(tp=4)):
    held = fake_mesh.build_everywhere(hf, dims, lambda chunks: load_hf_weights(chunks, state), dtype=torch.float32)
    exported = fake_mesh.export(held)
    assert exported.keys() == state.keys() and all(torch.equal(exported[name], state[name]) for name in state)
    assert type(held[0][0].chunks[0]).__name__ == "AcmeGPT"
mb.ParallelDims().initialize(device="cpu")
(worst,) = worst_differences([(hf, mb.ParallelDims(), reference_logits(hf))])
assert worst < 2e-5, worst
print("as right as ours")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder into which pip has installed the package, from a wheel made of its source."""
    folder = tmp_path_factory.mktemp("site")
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    info = "acme_models-1.0.dist-info"
    lines = [f"{name} = {value}" for name, value in project["entry-points"]["mcore_bridge.architectures"].items()]
    wheel = folder / "acme_models-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in (SOURCE / "acme_models").glob("*.py"):
            archive.write(path, f"acme_models/{path.name}")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: acme-models\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/entry_points.txt", "\n".join(["[mcore_bridge.architectures]", *lines]))
        archive.writestr(f"{info}/RECORD", "")
    target = folder / "site-packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", target, wheel]
    subprocess.run(pip, check=True)
    return target


def test_an_outside_architecture_by_entry_point(site, tmp_path):
    config = {
        "model_type": "acme",
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "head_dim": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    root = str(Path(__file__).parent.parent.parent)
    run = subprocess.run(
        [sys.executable, "-c", USE, str(tmp_path)],
        env={"PYTHONPATH": f"{site}:{root}", "OMP_NUM_THREADS": "1", "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert run.stdout.endswith("as right as ours\n"), run.stderr[-3000:]
