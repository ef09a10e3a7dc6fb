"""Mistakes of callers raise an error of this library before anything is written."""

import contextlib
import inspect
import os
import re

import pytest
import torch
from transformers import LlamaConfig

import mcore_bridge as mb
from mcore_bridge.arguments import COUNT, require
from mcore_bridge.convert.convert import convert
from mcore_bridge.convert.hf_to_torch import rank_files
from mcore_bridge.errors import BridgeError
from mcore_bridge.weights.dist_checkpoint.folder import TRACKER
from mcore_bridge.weights.ipc.shared_memory import allocate, share
from tests.support import eagle3, fake_mesh
from tests.support.strategies import random_state, tiny
from tests.support.strategies import save as save_state

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_key_value_heads": 2}
HF = tiny("qwen3_moe", vocab_size=97, num_hidden_layers=1, **MOE)
EXPERT = "model.layers.0.mlp.experts.3.down_proj.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    save_state(random_state(HF), HF, folder)
    return folder


@pytest.fixture
def models(source):
    with fake_mesh.rank_of(mb.ParallelDims(), 0, 1):
        yield mb.build_model(source, dims=mb.ParallelDims(), dtype=torch.float32, device="cpu")


def load(change):
    """Load all pairs of a state, each changed by ``change``."""
    pairs = [pair for name, tensor in random_state(HF).items() for pair in change(name, tensor)]
    return lambda models, folder: mb.load_hf_weights(models, pairs)


def tied():
    """A model whose head is its embedding."""
    return mb.build_model(tiny("qwen3", tie_word_embeddings=True), load_weights=False, device="cpu")


def fill(models, folder):
    """Fill a ring in another order than its plan."""
    ring = mb.BufferRing(mb.plan_buckets(mb.manifest(models), num_slots=2))
    try:
        list(ring.fill(iter([*mb.iter_hf_weights(models)][::-1]), acknowledged=lambda: None))
    finally:
        ring.close()


CALLS = {
    "expert_format": (
        lambda models, folder: mb.save_hf_checkpoint(models, folder, expert_format="both"),
        "expert_format must be .*'both'",
    ),
    "device of an export": (
        lambda models, folder: mb.to_hf_state_dict(models, device="gpu:0"),
        "device must be a torch.device.*found 'gpu:0'",
    ),
    **{
        f"no flag {name}": (call, f"{name.split()[0]} must be True or False.*found 'no'")
        for name, call in {
            "keep": lambda models, folder: mb.save_hf_checkpoint(models, folder, keep="no"),
            "strict": lambda models, folder: mb.load_hf_weights(models, random_state(HF), strict="no"),
            "merged": lambda models, folder: mb.to_hf_state_dict(models, merged="no"),
            "digests": lambda models, folder: mb.manifest(models, digests="no"),
            "strict of a checkpoint": lambda models, folder: mb.load_checkpoint(models, folder, strict="no"),
            "strict_config": lambda models, folder: mb.build_model(HF, strict_config="no"),
            "local_names": lambda models, folder: mb.engine_ranks(local_names="no"),
        }.items()
    },
    "no path": (
        lambda models, folder: mb.save_hf_checkpoint(models, None),
        "expected a path, found None: pass a string",
    ),
    "null byte": (
        lambda models, folder: mb.save_hf_checkpoint(models, f"{folder}\0"),
        "expected a path, found a null byte",
    ),
    "bytes": (lambda models, folder: mb.save_hf_checkpoint(models, folder, slot_bytes=1e9), "slot_bytes must be"),
    "dtype's name": (
        lambda models, folder: mb.build_model(HF, dtype="bf17"),
        'bfloat16 or float16, or "auto", found .bf17',
    ),
    "dtype of adapters": (
        lambda models, folder: mb.add_adapters(models, rank=1, alpha=1, targets=["q_proj"], dtype="int8"),
        "its name such as .bfloat16.*found torch.int8",
    ),
    "dtypes": (
        lambda models, folder: mb.save_hf_checkpoint(models, folder, dtype={"*": "nothing"}),
        "a dict of such by name patterns.*found 'nothing'",
    ),
    "size": (lambda models, folder: mb.EngineRank(tp="2"), r"expected sizes of at least 1, found \{'tp': '2'\}"),
    "multiple": (lambda models, folder: mb.EngineRank(vocab_multiple="8"), "vocab_multiple must be a whole number of"),
    "steps of no draft": (
        lambda models, folder: mb.forward(models, torch.zeros(1, 2).long(), draft_steps=2),
        "draft_steps must be 1 without drafts, found 2: pass drafts, or",
    ),
    "sizes": (lambda models, folder: mb.engine_ranks(tp="2"), "expected sizes of at least 1"),
    "target": (lambda models, folder: list(mb.iter_hf_weights(models, target="all")), "expected target=.* found 'all'"),
    "source": (lambda models, folder: mb.load_hf_weights(models, 7), "expected a folder, a mapping .* found 7"),
    "arrays": (
        load(lambda name, tensor: [(name, tensor.numpy())]),
        "a dense torch.Tensor .* found ndarray: convert it",
    ),
    "sparse": (load(lambda name, tensor: [(name, tensor.to_sparse())]), "found torch.sparse_coo on cpu: convert it"),
    "meta": (load(lambda name, tensor: [(name, tensor.to("meta"))]), "found torch.strided on meta: convert it"),
    "an expert twice": (load(lambda name, tensor: [(name, tensor)] * (1 + (name == EXPERT))), f"{EXPERT} came twice"),
    "an expert more": (
        load(lambda name, tensor: [(name, tensor), (name.replace(".3.", ".4."), tensor)][: 1 + (name == EXPERT)]),
        r"1 unexpected \['model\.layers\.0\.mlp\.experts\.4\.",
    ),
    "no slots": (
        lambda models, folder: mb.plan_buckets(mb.manifest(models), num_slots=0),
        "num_slots must be a whole number of at least 1, found 0",
    ),
    "no model": (lambda models, folder: mb.build_model(None), "HF folder or as a config of transformers, found .*None"),
    "no GPU": (lambda models, folder: mb.build_model(HF, device="cuda:9"), r"device 'cuda:9' needs a GPU"),
    "others": (lambda models, folder: mb.manifest(torch.nn.Linear(1, 1)), "found Linear: pass what build_model"),
    "no plan": (lambda models, folder: mb.BufferRing(mb.manifest(models)), r"found a Manifest: pass plan_buckets\("),
    "no manifest": (lambda models, folder: mb.plan_buckets(models), "found a GPTModel in it: pass manifest"),
    "torch's optimizer": (
        lambda models, folder: mb.save_checkpoint(
            models, folder, optimizer=torch.optim.Adam(mb.to_hf_state_dict(models).values())
        ),
        "optimizer must be megatron-core's, .* found Adam: leave it out",
    ),
    "one target": (
        lambda models, folder: mb.add_adapters(models, rank=1, alpha=1, targets="q_proj"),
        r"targets must be a list of module names, .* found 'q_proj'",
    ),
    "no targets": (
        lambda models, folder: mb.add_adapters(models, rank=1, alpha=1, targets=[]),
        r"targets must be a list of module names, .* found \[\]",
    ),
    "the head of a tied model": (
        lambda models, folder: mb.add_adapters(tied(), rank=1, alpha=1, targets=["lm_head"]),
        "'lm_head' is the word embedding model.embed_tokens.weight, as the head is tied to it",
    ),
    "unknown target": (
        lambda models, folder: mb.add_adapters(models, rank=1, alpha=1, targets=["xyz"]),
        r"'xyz' matches no module, there are \['down_proj', .* 'o_proj', 'q_proj', ",
    ),
    "no path of adapters": (
        lambda models, folder: mb.add_adapters(models, {"r": 8}),
        r"folder must be the path of an adapter, found \{'r': 8\}",
    ),
    "order": (fill, "make the plan from the manifest of these tensors"),
}


@pytest.mark.parametrize("what", CALLS)
def test_a_wrong_call_is_told_what_was_expected(tmp_path, models, what):
    call, message = CALLS[what]
    with pytest.raises(BridgeError, match=message):
        call(models, tmp_path / "out")
    assert os.listdir(tmp_path) == []


NOT_TRIED = {"forward", "log_probs", "pack_sequences", "unpack_sequences", "TokenOutputs", "PackedSequences"}
"""Functions for batches, which have separate tests."""
RESULTS = {
    "LoadReport",
    "CheckpointReport",
    "PendingSave",
    "Adapters",
    "Manifest",
    "EngineMap",
    "Architecture",
    "Support",
}
DATA = {"BridgeError", *mb._ERRORS, *RESULTS}
"""Classes of results, which callers only read, or whose fields the author of an architecture writes."""
MARK = allocate(8, torch.device("cpu"))
EMPTY_MAP = mb.EngineMap("", (), (), ())
WRONG = (None, [], [3], {}, 7, -1, 0, 2.5, float("nan"), float("inf"), 10**30, "", "none", b"x", object())


def good(models, folder, source):
    """Arguments for each public callable; a callable that is missing here has no required arguments."""
    plan = mb.plan_buckets(mb.manifest(models), num_slots=2)
    handles = [share(MARK, EMPTY_MAP.digest)]
    return {
        "build_model": {"hf": HF, "device": "cpu", "load_weights": False},
        "build_draft": {"models": models, "hf": LlamaConfig(**eagle3.fields_of(HF, draft_vocab_size=HF.vocab_size))},
        "drafting": {"models": models, "drafts": models},
        "adopt": {"models": models, "hf": HF},
        "load_hf_weights": {"models": models, "source": source},
        "save_hf_checkpoint": {"models": models, "folder": folder / "saved"},
        "save_checkpoint": {"models": models, "folder": folder / "dist"},
        "load_checkpoint": {"models": models, "folder": source},
        "add_adapters": {"models": models, "rank": 1, "alpha": 1, "targets": ["q_proj"]},
        "save_hf_adapters": {"models": models, "folder": folder / "adapters"},
        "load_adapters": {"models": models, "folder": folder / "adapters"},
        "plan_buckets": {"manifest": mb.manifest(models)},
        "BufferRing": {"plan": plan},
        "Receiver": {"plan": plan, "handles": []},
        "EngineWriter": {"engine_map": EMPTY_MAP, "handles": handles},
        "export_into": {"models": models, "writer": mb.EngineWriter(EMPTY_MAP, handles)},
        "WeightSync": {"models": models},
        "vllm_source": {"models": models, "backend": "nccl"},
        "set_adapters": {"models": models, "name": "default"},
        "map_engine": {"plan": plan, "source": torch.nn.Linear(2, 2), "load": print},
        "mapping": {"hf": HF},
        "to_transformer_config": {"hf": HF},
        "to_gpt_arguments": {"hf": HF},
        "to_layer_spec": {"hf": HF},
        "register": {"architecture": None},
        **{name: {"models": models} for name in ("iter_hf_weights", "to_hf_state_dict", "iter_hf_shards")},
        **{name: {"models": models} for name in ("manifest", "iter_hf_adapters", "without_adapters")},
    }


def attempts(name, known):
    """Calls with one wrong argument each, and a description of the mistake."""
    call = getattr(mb, name)
    for parameter in inspect.signature(call).parameters.values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        for value in WRONG:
            yield f"{name}({parameter.name}={value!r})", call, {**known.get(name, {}), parameter.name: value}


UNADVISED = re.compile(r"found (?:(?!: |; |\? |\. [A-Z]).)*$")
"""The end of a message that says what was found, and not what to do."""


def outcome(call, arguments):
    """An error that is not an error of this library, or that gives no advice, as text; empty if there is none."""
    try:
        with contextlib.ExitStack() as stack:
            made = call(**arguments)
            if hasattr(made, "__next__"):
                next(made, None)
            if hasattr(made, "close"):
                stack.callback(made.close)
    except BridgeError as error:
        if UNADVISED.search(str(error)):
            return f"no advice: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def test_every_wrong_argument_has_an_error_of_ours_or_is_legal(models, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    known, raw = good(models, tmp_path, source), []
    for name in sorted(mb._HOMES.keys() - NOT_TRIED - DATA):
        raw += [f"{what}: {text}" for what, *pair in attempts(name, known) if (text := outcome(*pair))]
    assert not raw, f"{len(raw)}:\n" + "\n".join(raw)


@pytest.mark.parametrize(
    ("names", "advice"),
    [
        (["metadata.json"], "it is a checkpoint of megatron-core: make an HF folder"),
        (["pytorch_model.bin"], "such as pytorch_model.bin: save the model again with save_pretrained"),
        ([], "download them too, or let mcore-bridge draw write random ones"),
    ],
)
def test_a_folder_without_weights_says_what_to_do(tmp_path, models, names, advice):
    HF.save_pretrained(tmp_path)
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(BridgeError, match=rf"expected \*.safetensors files in .*, found none: .*{advice}") as raised:
        mb.build_model(tmp_path, device="cpu")
    assert "load_weights=False" in raised.value.__notes__[0]


def quiet(*event):
    """Ignore progress."""


def assert_same(one, other):
    one, other = (mb.Manifest.from_folder(folder, digests=True) for folder in (one, other))
    assert one.differences(other) == ()


def test_a_conversion_that_cannot_be_put_into_place_goes_on_when_that_is_mended(tmp_path, source):
    target = tmp_path / "run" / "release"
    (target / "common.pt").mkdir(parents=True)
    (tmp_path / "run" / TRACKER).mkdir()
    with pytest.raises(BridgeError, match=r"common\.pt is a folder, expected a file: move it away"):
        convert(source, target, on_event=quiet)
    (target / "common.pt").rmdir()
    with pytest.raises(BridgeError, match=f"is complete, but .*{TRACKER}, by which .* cannot be written"):
        convert(source, target, on_event=quiet)
    convert(target, tmp_path / "back", file_bytes=1, on_event=quiet)
    assert_same(tmp_path / "back", source)
    with pytest.raises(BridgeError, match="expected processes of at least 1"):
        convert(source, tmp_path / "out", num_processes=0, on_event=quiet)


def test_the_files_of_another_mesh_do_not_stay_behind(tmp_path, source):
    for dims in (mb.ParallelDims(tp=2, ep=2), mb.ParallelDims()):
        convert(source, tmp_path / "files", rank_files=rank_files("torch", dims, "torch"), on_event=quiet)
    assert os.listdir(tmp_path / "files" / "release") == ["mp_rank_00"]
    convert(tmp_path / "files", tmp_path / "back", on_event=quiet)
    assert_same(tmp_path / "back", source)


@pytest.mark.parametrize("size", [0, -1, True, 1.5, "5GB", 2**63])
def test_a_size_that_is_no_count_is_refused(size: object) -> None:
    require(BridgeError, slot_bytes=(1, COUNT))
    with pytest.raises(BridgeError, match="slot_bytes must be a whole number of at least 1, found"):
        require(BridgeError, slot_bytes=(size, COUNT))
