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
import mcore_bridge as mb

class Stale(mb.WeightSync):  # its engine gets no weights after the first time
    def __call__(self):
        return self.version or super().__call__()

def awake(pipe, method, *rest):  # from the first time on
    if method not in left_out:
        left_out.update({{method}} - {{"generate"}})
        return ask(pipe, method, *rest)

if __name__ == "__main__":
    mb.WeightSync = Stale
    import grpo
    grpo.ask, ask, left_out = awake, grpo.ask, {{"sleep"}}
    grpo.main()
"""

DIGESTED = f"""
import multiprocessing
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import engine_process
import rollout_engine
import torch
import mcore_bridge as mb
from mcore_bridge.weights.manifest import digest

class Digested(rollout_engine.Engine):
    loads = 0

    def load_weights(self, pairs):
        self.loads += 1
        super().load_weights(pairs)

    def digests(self):
        assert self.loads <= 2  # all to make the map, or to prove a kept one
        return {{name: digest(weight) for name, weight in self.weights.items()}}

class Checked(mb.WeightSync):  # what the engine holds after a round is what the trainer gave, bit for bit
    before = None

    def __init__(self, models, engine):
        super().__init__(models, engine)
        self.models, self.engine = models, engine

    def __call__(self):
        super().__call__()
        given = {{entry.name: entry.sha256 for entry in mb.manifest(self.models, digests=True)}}
        if self.engine:
            held = engine_process.ask(self.engine, "digests")
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
    rollout_engine.Engine, mb.WeightSync = Digested, Checked
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
    steps = re.findall(r"^step (\d+): reward 0\.\d+, .* (\S+) at worst .*$", said, re.MULTILINE)
    assert [int(step) for step, _ in steps] == list(range(5))
    assert all(float(apart) < 1e-5 for _, apart in steps), said


@pytest.mark.skipif("qwen3_vl" not in towers.NAMES, reason="the installed transformers is too old")
def test_a_model_learns_to_look_at_images(tmp_path, monkeypatch):
    """What is good to say is in the images alone. The id of an image is even: the model samples it as well."""
    folder, steps = tmp_path / "checkpoint", 12
    monkeypatch.setattr(sys, "argv", ["make_checkpoint.py", str(folder), "--images"])
    runpy.run_path(str(EXAMPLES / "make_checkpoint.py"), run_name="__main__")
    (tmp_path / "digested.py").write_text(DIGESTED)
    options = ("--tp", "2", "--steps", str(steps), "--micro-batch", "16", "--images", "--model", str(folder))
    codes, said = forked(tmp_path / "digested.py", 2, "--device", "cpu", *options)
    assert codes == [0, 0], said
    names = load_file(folder / "model.safetensors").keys()
    assert re.findall(r"^the same, (\d+) weights$", said, re.MULTILINE) == [str(len(names))] * steps
    tower = sum(name.startswith("model.visual.") for name in names)
    assert re.findall(r"^towers of (\d+)$", said, re.MULTILINE) == [str(tower)] * 2 * steps
    found = re.findall(r"^step \d+: reward (\S+), .* (\S+) at worst .*$", said, re.MULTILINE)
    assert all(float(apart) < 1e-5 for _, apart in found), said
    rewards = [float(reward) for reward, _ in found]
    assert sum(rewards[-3:]) / 3 > 0.6 > 0.55 > sum(rewards[:3]) / 3, said


def test_stale_weights_end_the_run(tmp_path):
    """As a user starts it: torchrun and two fresh interpreters, one of them the engine's."""
    (tmp_path / "stale.py").write_text(STALE)
    finished = torchrun(tmp_path / "stale.py", 1, "--steps", "3")
    assert finished.returncode
    assert "step 0" in finished.stdout
    assert "step 2" not in finished.stdout
    assert "expected log-probs within 0.001 and equal weights" in finished.stderr


@pytest.mark.parametrize("name", ["grpo", "make_checkpoint", "make_real_checkpoint", "say"])
def test_each_example_prints_help_and_writes_nothing(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert (ended.value.code, [*tmp_path.iterdir()]) == (0, [])
    assert f"usage: {name}.py" in capsys.readouterr().out
