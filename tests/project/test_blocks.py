"""The Python blocks of README.md and docs/ run as they are written: all blocks of a page in one flat script.

Each page is started once for each number of processes, as torchrun does it: with its environment, and as ``__main__``.
The processes are forked from one that has imported torch. ``test_examples.py`` starts a script by torchrun itself.
"""

import re
from pathlib import Path

import pytest
import torch

from mcore_bridge.convert.convert import convert
from tests.support import eagle3, seeing, towers
from tests.support.strategies import random_state, save, tiny
from tests.support.torchrun import forked

ROOT = Path(__file__).parent.parent.parent
WHOLE = """
import os
os.chdir({folder!r})
"""
MODELS = """
import torch
import mcore_bridge as mb
dims = mb.ParallelDims(pp=int(os.environ["WORLD_SIZE"]))
dims.initialize(device="cpu")
models = mb.build_model("path/of/Qwen3-8B", dims=dims, dtype=torch.float32)
"""
DRAFTS = """
engines, drafts = [], mb.build_model("path/of/Qwen3-8B", dims=dims, dtype=torch.float32)
"""
TOKENS = """
import torch
input_ids = torch.arange(24).view(4, 6)
attention_mask = torch.ones(4, 6, dtype=torch.int64)
advantages, num_tokens = torch.ones(4, 6), 24
"""
ENGINE = """
class engine:
    def load_weights(pairs):
        assert all(tensor.isfinite().all() for name, tensor in pairs)
"""
ACTOR = """
dims = mb.ParallelDims(pp=int(os.environ["WORLD_SIZE"]))
dims.initialize(device="cpu")
actor = Actor("path/of/Qwen3-8B", dims=dims, dtype=torch.float32)
actor.backward(input_ids, attention_mask, torch.ones(4))
"""
RLINF = """
transformer_config = mb.to_transformer_config("path/of/Qwen3-8B", dims=dims)
path, ReshardConfig = "path/of/Qwen3-8B", dict
"""
MESH = """
import mcore_bridge as mb
mb.ParallelDims(tp=2, pp=2).initialize(device="cpu")
"""
IMAGES = """
input_ids, attention_mask, (inputs, _) = torch.load("images.pt")
loss = lambda outputs, rows: outputs.log_probs.mean()
"""
ENGINES = "engines = []\n"
SYNC = ENGINES + "num_steps, train = 2, print\n"
VERIFY = """
from mcore_bridge.engines import EngineWorker
head = torch.nn.Linear(48, 96, bias=False)
class Own:
    worker = EngineWorker(head, lambda pairs: head.weight.data.copy_(dict(pairs)["lm_head.weight"]), name="own")
    def __call__(self, info):
        self.worker.receive(info)
    def log_probs(self, prompts):
        return mb.forward(models, torch.tensor(prompts)).log_probs
sync, prompts = mb.WeightSync(models, Own()), [[1, 2, 3], [4, 5, 6]]
sync()
"""
PAGES = {
    "README.md": ([TOKENS + ENGINES], (4,)),
    "docs/index.md": ([ENGINES], (4,)),
    "docs/start.md": ([""], (2,)),
    "docs/guide/batches.md": ([MODELS + TOKENS], (1, 2)),
    "docs/guide/adapters.md": ([""] * 8, (1, 2)),
    "docs/guide/checkpoints.md": ([MODELS + "optimizer = None", "", "model = models[0]"], (1, 2)),
    "docs/internals/design.md": (["from mcore_bridge.rules.layout import Concat, GROUPS, Rearrange", "", ""], (1, 2)),
    "docs/guide/drafts.md": ([TOKENS, ""], (2,)),
    "docs/guide/embedding.md": (["", TOKENS + ACTOR], (1, 2)),
    "docs/guide/load.md": (["", ""], (2,)),
    "docs/guide/sync.md": ([MODELS + SYNC, VERIFY, "", DRAFTS, "", ENGINE], (1,)),
    "docs/reference/api.md": ([""], (1,)),
    "docs/guide/handing_on.md": ([""], (1, 2)),
    "docs/trainers/rlinf.md": ([MODELS + RLINF], (1, 2)),
    "docs/guide/targets.md": ([MODELS], (1, 2)),
    "docs/guide/images.md": ([MESH, IMAGES], (4,)),
    "docs/guide/logging.md": ([""] * 2, (1,)),
}
"""Code to run before each block, since a reader already has its results; and numbers of processes."""
NOT_HERE = {
    ("docs/guide/sync.md", 4): "its engines are real ones",
    ("docs/guide/handing_on.md", 1): "its engine is another process, as in tests/weights/test_direct_export.py",
    ("docs/guide/adapters.md", 3): "it multiplies large matrices in fp64, for figures alone",
    ("docs/trainers/sglang.md", 0): "SGLang is not installed",
    ("docs/trainers/vllm.md", 0): "vLLM is not installed",
    ("docs/trainers/vllm.md", 1): "vLLM is not installed",
    ("docs/trainers/vllm.md", 2): "checkpoint-engine is not installed",
    ("docs/guide/add_a_family.md", 0): "it is a copy of mcore_bridge/models/qwen3.py",
    ("docs/guide/quantized.md", 0): "the folder of DeepSeek-V3 is not there",
    ("docs/guide/quantized.md", 1): "vLLM is not installed, and tests/weights/test_encoding.py runs the like",
    ("docs/guide/quantized.md", 2): "TransformerEngine needs a GPU, where tests/gpu/test_gpu_fp8_parameters.py runs it",
    ("docs/guide/hybrid_model.md", 0): "the oldest megatron-core that is tested has no HybridModel",
    ("docs/guide/images.md", 2): "its two models are of two families",
}
"""Blocks that do not run, by their number."""


def blocks_of(page):
    found = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return [block for number, block in enumerate(found) if (page, number) not in NOT_HERE]


def test_every_page_with_blocks_is_run():
    pages = ["README.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
    assert {page for page in pages if blocks_of(page)} == PAGES.keys()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The reader's working folder: it has a small model under the names in the pages."""
    path = tmp_path_factory.mktemp("reader")
    hf = tiny("qwen3")
    model = path / "path" / "of" / "Qwen3-8B"
    model.mkdir(parents=True)
    save(random_state(hf), hf, model)
    head = eagle3.fields_of(hf, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    eagle3.write(model.parent / "EAGLE3-Qwen3-8B", head, eagle3.random_head(head, hf, own_embedding=False))
    (path / "demo").mkdir()
    (path / "demo" / "qwen3").symlink_to(model)
    convert(model, Path(f"{model}-torch-dist"), on_event=lambda *event: None)
    if towers.NAMES:
        seen = seeing.written("qwen3_vl", path / "path" / "of" / "Qwen3-VL-8B", num_hidden_layers=4)
        torch.save([each[:2] for each in seeing.batch_of(seeing.reference(seen))], path / "images.pt")
    return path


@pytest.mark.parametrize(
    ("page", "size"), [(page, size) for page, (_, sizes) in PAGES.items() for size in sizes], ids=str
)
def test_blocks_run_as_they_are_written(page, size, folder, tmp_path):
    if page == "docs/guide/images.md" and not towers.NAMES:
        pytest.skip("the installed transformers is too old")
    script = tmp_path / "page.py"
    placeholders, _ = PAGES[page]
    parts = [part for pair in zip(placeholders, blocks_of(page), strict=True) for part in pair]
    script.write_text("\n".join([WHOLE.format(folder=str(folder)), *parts]))
    codes, said = forked(script, size)
    assert codes == [0] * size, said
    if page == "docs/guide/handing_on.md":
        numbers = re.findall(r"the (trainer|engine) has (\d+ tensors, \d+ bytes)", said)
        assert sorted(who for who, _ in numbers) == ["engine"] * size + ["trainer"] * size
        assert len({what for _, what in numbers}) == 1


EXAMPLES = """
import doctest
from megatron.core import parallel_state
given = {key: value for key, value in globals().items() if not key.startswith("_")}
finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF)
for home, name in [*((mb, name) for name in mb.__all__), *((engines, name) for name in engines.__all__)]:
    (test,) = finder.find(getattr(home, name), name, module=False, globs=dict(given))
    assert test.examples and not any(doctest.SKIP in example.options for example in test.examples), name
    runner.run(test)
assert runner.summarize().failed == 0
"""


def test_every_public_name_has_an_example_that_runs(folder, tmp_path):
    """After the block of docs/reference/api.md, in one process."""
    (block,) = blocks_of("docs/reference/api.md")
    (tmp_path / "examples.py").write_text("\n".join([WHOLE.format(folder=str(folder)), block, EXAMPLES]))
    codes, said = forked(tmp_path / "examples.py", 1)
    assert codes == [0], said


FLAT = """
import multiprocessing
import mcore_bridge as mb
mb.ParallelDims().initialize(device="cpu")
process = multiprocessing.get_context("spawn").Process(target=print)
process.start()
process.join()
assert process.exitcode == 1
"""


def test_a_script_that_needs_a_guard_is_told_so_at_once(tmp_path):
    """A process that the page starts runs its code again. It would wait there for ranks that do not exist."""
    (tmp_path / "flat.py").write_text(FLAT)
    codes, said = forked(tmp_path / "flat.py", 1)
    assert codes == [0], said
    assert "MeshError: this script runs again in a process that it has started" in said
