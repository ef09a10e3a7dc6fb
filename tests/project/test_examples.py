"""The training loop of ``examples``: engine and trainer agree at every step, and a stale weight ends the run."""

import re
import runpy
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support import towers
from tests.support.torchrun import forked, torchrun

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
STALE = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import rollout_engine

class Stale(rollout_engine.RemoteEngine):  # it neither sleeps nor takes weights after the first time
    fed = False

    def __call__(self, method, *arguments):
        return None if method == "sleep" or (method == "wake" and self.fed) else super().__call__(method, *arguments)

    def sync(self, ring, pairs):
        list(pairs) if self.fed else super().sync(ring, pairs)
        self.fed = True

if __name__ == "__main__":
    rollout_engine.RemoteEngine = Stale
    import grpo
    grpo.main()
"""

DIGESTED = f"""
import multiprocessing
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import rollout_engine
import torch
from mcore_bridge.weights.manifest import digest

class Digested(rollout_engine.Engine):
    loads = 0

    def load_weights(self, pairs):
        self.loads += 1
        super().load_weights(pairs)

    def digests(self):
        assert self.loads == 2  # both to make the map
        return {{name: digest(weight) for name, weight in self._weights.items()}}

class Checked(rollout_engine.RemoteEngine):  # what the engine holds after a round is what the trainer gave, bit for bit
    before = None

    def sync(self, ring, pairs):
        given = {{}}

        def noted():
            for name, tensor in pairs:
                given[name] = digest(tensor)
                yield name, tensor

        super().sync(ring, noted())
        held = self("digests")
        assert held == given, [name for name in given if held.get(name) != given[name]]
        assert self.before is None or all(self.before[name] != given[name] for name in given)
        self.before = given
        print("the same,", len(given), "weights", flush=True)

def watched(chunks, arguments):  # ranks that hold the model of images change it in the same way
    models, step = prepare(chunks, arguments)

    def stepped():
        step()
        towers, parts = [None, None], [chunk.vision for chunk in chunks if hasattr(chunk, "vision")]
        own = {{name: digest(each) for part in parts for name, each in part.state_dict().items()}}
        torch.distributed.all_gather_object(towers, own)
        assert towers[0] == towers[1], [name for name in own if towers[0][name] != towers[1][name]]
        print("towers of", len(own), flush=True)

    return models, stepped

if __name__ == "__main__":
    get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda kind: get_context("forkserver")  # it has imported torch already
    rollout_engine.Engine, rollout_engine.RemoteEngine = Digested, Checked
    import grpo
    grpo.prepare, prepare = watched, grpo.prepare
    grpo.main()
"""


def test_engine_and_trainer_agree_in_every_bit_at_every_step(tmp_path):
    """Through the trainer's steps, and the engine's sleep in between; each step changes each weight."""
    (tmp_path / "digested.py").write_text(DIGESTED)
    codes, said = forked(tmp_path / "digested.py", 2, "--device", "cpu", "--steps", "5", "--pp", "2")
    assert codes == [0, 0], said
    assert re.findall(r"^the same, (\d+) weights$", said, re.MULTILINE) == ["47"] * 5
    steps = re.findall(r"^step (\d+): reward 0\.\d+, .* (\S+) apart$", said, re.MULTILINE)
    assert [int(step) for step, _ in steps] == list(range(5))
    assert all(float(apart) < 1e-5 for _, apart in steps), said


@pytest.mark.skipif("qwen3_vl" not in towers.NAMES, reason="the installed transformers is too old")
def test_a_model_learns_to_look_at_images(tmp_path, monkeypatch):
    """What is good to say is in the images alone. The id of an image is even: the model samples it as well."""
    folder, steps = tmp_path / "checkpoint", 12
    monkeypatch.setattr(sys, "argv", ["make_checkpoint.py", str(folder), "--images"])
    runpy.run_path(str(EXAMPLES / "make_checkpoint.py"), run_name="__main__")
    (tmp_path / "digested.py").write_text(DIGESTED)
    options = ("--tp", "2", "--steps", str(steps), "--images", "--model", str(folder))
    codes, said = forked(tmp_path / "digested.py", 2, "--device", "cpu", *options)
    assert codes == [0, 0], said
    names = load_file(folder / "model.safetensors").keys()
    assert re.findall(r"^the same, (\d+) weights$", said, re.MULTILINE) == [str(len(names))] * steps
    tower = sum(name.startswith("model.visual.") for name in names)
    assert re.findall(r"^towers of (\d+)$", said, re.MULTILINE) == [str(tower)] * 2 * steps
    found = re.findall(r"^step \d+: reward (\S+), .* (\S+) apart$", said, re.MULTILINE)
    assert all(float(apart) < 1e-5 for _, apart in found), said
    rewards = [float(reward) for reward, _ in found]
    assert sum(rewards[-3:]) / 3 > 0.6 > 0.55 > sum(rewards[:3]) / 3, said


def test_stale_weights_end_the_run(tmp_path):
    """As a user starts it: torchrun and three fresh interpreters, one of them the engine's."""
    (tmp_path / "stale.py").write_text(STALE)
    finished = torchrun(tmp_path / "stale.py", 2, "--steps", "3", "--tp", "2", "--engine-loads", "by-loader")
    assert finished.returncode
    assert "step 0" in finished.stdout
    assert "step 2" not in finished.stdout
    assert "its weights are not the trainer's" in finished.stderr
