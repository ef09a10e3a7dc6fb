"""Malicious folders: no file outside is touched, no code runs, and no process hangs.

Each row damages a whole folder in one place. Then a read either raises an error with a message, or returns correct
values. Headers of files and indexes are drawn at random in ``test_headers.py`` and ``test_folders.py``.
"""

import hashlib
import io
import json
import os
import pickle
import re
import shutil
import signal
import zipfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

import mcore_bridge as mb
from mcore_bridge.architecture import read_hf
from mcore_bridge.convert.convert import convert
from mcore_bridge.convert.hf_to_torch import rank_files
from mcore_bridge.convert.rank_files.file import NAME
from mcore_bridge.errors import BridgeError, CheckpointError, TransferError, printable
from mcore_bridge.foreign_files import parse
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.trainers.rlinf.cached_folder import FINGERPRINT, made_once
from mcore_bridge.weights.dist_checkpoint.folder import TRACKER
from mcore_bridge.weights.dist_checkpoint.metadata import is_tiled
from mcore_bridge.weights.files.folder_lock import LOCK, Writer
from mcore_bridge.weights.files.hf_folder import Checkpoint
from mcore_bridge.weights.peft.peft_folder import open_peft
from mcore_bridge.weights.plan.boxes import BoxCopy, Dim
from mcore_bridge.weights.plan.engine_map import EngineMap, EngineTensor, SliceCopy, SliceFill
from mcore_bridge.weights.source.encoded_weights import quantization_in
from tests.support import pool
from tests.support.conversions import assert_exact, quiet, written
from tests.support.exports import built
from tests.support.strategies import random_state, tiny

HF = tiny("qwen3", vocab_size=97, num_hidden_layers=2)
TERABYTES = 1 << 42
KEY = "decoder.layers.1.self_attention.linear_proj.weight"
ODD_ROWS = (([-1], "int8"), ([0.5], "int8"), ('["a"]', "int8"), ([1], "load"), ([1], "none"), (1, "int8"))
HOME, LEFT = ".mcore_bridge.0123abcd", ".mcore_bridge.convert"


@pytest.fixture
def nobody_waits():
    """Limit the time of each test, since a FIFO would block forever. The pool has a separate limit."""

    def late(*_):
        raise TimeoutError("it waits for something that never comes")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(300)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A model as HF's folder and as a checkpoint of megatron-core."""
    folder = tmp_path_factory.mktemp("whole")
    written(random_state(HF), HF, folder / "hf")
    convert(folder / "hf", folder / "dist", on_event=quiet)
    return folder


class Gadget:
    """An object that makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def holed(path, size=TERABYTES):
    """Make a file that takes no room, and would fill any memory or disk."""
    path.touch()
    os.truncate(path, size)


def fifo(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


# what lies in a target ------------------------------------------------------------------------------------------------


def lock_of(path, **fields):
    own = {name: getattr(Writer(), name) for name in Writer.__dataclass_fields__}
    (path / LOCK).write_text(json.dumps({**own, **fields}))


def left(home, live="new", names=("config.json",), files=()):
    """The files that a save may leave if it dies during its commit."""
    for name in files:
        (home / "new" / name).parent.mkdir(parents=True, exist_ok=True)
        (home / "new" / name).write_text("evil")
    (home / "new").mkdir(parents=True, exist_ok=True)
    (home / "names.json").write_text(json.dumps(names))
    (home / "live").symlink_to(live)


def leads_up(out, mine):
    left(out / HOME, names=["../mine/file"])
    (out / HOME / "mine").mkdir()
    (out / HOME / "mine" / "file").write_text("evil")


def leads_through_a_link(out, mine):
    left(out / HOME, names=["sub/file"], files=["sub/file"])
    (out / "sub").symlink_to(mine)


def is_a_link(out, mine):
    (mine / "new").mkdir()
    (out / LEFT).symlink_to(mine)


def of_a_conversion(name):
    def harm(out, mine):
        (out / LEFT / "new").mkdir(parents=True)
        (out / LEFT / "new" / "kept").touch()
        shutil.rmtree(out / LEFT / name, ignore_errors=True)
        (out / LEFT / name).symlink_to(mine if name == "new" else mine / "file")

    return harm


TARGETS = {
    "a lock that leads nowhere": (lambda out, mine: (out / LOCK).symlink_to("nowhere"), "does not name the writer"),
    "a lock that is a FIFO": (lambda out, mine: fifo(out / LOCK), "does not name the writer"),
    "a lock without an end": (lambda out, mine: (out / LOCK).symlink_to("/dev/zero"), "does not name the writer"),
    "a deep lock": (lambda out, mine: (out / LOCK).write_text("[" * 9999), "does not name the writer"),
    "a lock of nobody": (lambda out, mine: (out / LOCK).write_text("{}"), "does not name the writer"),
    "a lock of no number": (lambda out, mine: lock_of(out, pid="../self"), "does not name the writer"),
    "a lock that writes to terminals": (lambda out, mine: lock_of(out, host="\x1b[2J\n"), "does not name the writer"),
    "names that lead up": (leads_up, r"names lead out of it, such as '\.\./mine/file'; remove that folder"),
    "names that lead through a link": (leads_through_a_link, "names lead out of it, such as 'sub/file'"),
    "names of the root": (lambda out, mine: left(out / HOME, names=[str(mine / "file")]), "names lead out of it"),
    "files of another folder": (lambda out, mine: left(out / HOME, live=str(mine)), "live leads to '/"),
    "names that are numbers": (lambda out, mine: left(out / HOME, names=[1]), "is no list of names"),
    "names that are a FIFO": (
        lambda out, mine: (left(out / HOME), fifo(out / HOME / "names.json")),
        "names.json is a FIFO",
    ),
    "a home that is a link": (is_a_link, "is a link, expected a folder"),
    "a conversion to a link": (of_a_conversion("new"), None),
    "a plan that is a link": (of_a_conversion("plan.json"), None),
    "names that are a link": (of_a_conversion("names.json"), None),
    "results that are a link": (of_a_conversion("0.results"), None),
    "a step that was not taken": (of_a_conversion("next"), None),
    "a tracker that is a link": (lambda out, mine: (out.parent / f".{TRACKER}.new").symlink_to(mine / "file"), None),
    "a tracker that is a FIFO": (lambda out, mine: fifo(out.parent / f".{TRACKER}.new"), None),
}


@pytest.mark.usefixtures("nobody_waits")
@pytest.mark.parametrize("row", TARGETS)
def test_what_lies_in_a_target_harms_nothing_beside_it(row, whole, tmp_path):
    harm, message = TARGETS[row]
    out, mine = tmp_path / "iter_0000001", tmp_path / "mine"
    out.mkdir()
    mine.mkdir()
    (mine / "file").write_text("mine")
    harm(out, mine)
    if message is None:
        convert(whole / "hf", out, on_event=quiet)
        convert(out, tmp_path / "back", on_event=quiet)
        assert_exact(tmp_path / "back", Checkpoint(whole / "hf"))
        assert (tmp_path / TRACKER).read_text() == "1"
    else:
        with pytest.raises(CheckpointError, match=message) as error:
            convert(whole / "hf", out, on_event=quiet)
        assert "\x1b" not in str(error.value)
    assert [path.name for path in mine.iterdir() if path.is_file()] == ["file"]
    assert (mine / "file").read_text() == "mine"
    assert not (out / "file").exists()


# JSON -----------------------------------------------------------------------------------------------------------------

READERS = {
    "config.json": lambda path: read_hf(path.parent),
    "adapter_config.json": lambda path: open_peft(path.parent, mock.Mock(whole=None), num_layers=1, num_experts=0),
    "hf_quant_config.json": lambda path: quantization_in(path.parent),
    "model.safetensors.index.json": lambda path: Checkpoint(path.parent),
    "map.json": EngineMap.load,
}
"""Files of JSON that other programs write, with what reads them."""
HARMS = {
    "nothing": lambda path: None,
    "a FIFO": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a pointer": lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0"),
    "terabytes": holed,
    "a half": lambda path: path.write_text("{"),
    "other bytes": lambda path: path.write_bytes(b'{"a": "\xff"}'),
    "a deep one": lambda path: path.write_text("[" * 100_000),
    "many digits": lambda path: path.write_text(f'{{"a": {"9" * 5000}}}'),
    "a key twice": lambda path: path.write_text('{"weight_map": {"a": 1, "a": 1}, "quantization": {"a": 1, "a": 2}}'),
}


@pytest.mark.usefixtures("nobody_waits")
@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("row", HARMS)
def test_what_is_no_json_is_refused_with_its_name(row, name, tmp_path):
    if (row, name) in {("nothing", "hf_quant_config.json"), ("nothing", "model.safetensors.index.json")}:
        return  # they may be missing
    HARMS[row](tmp_path / name)
    with pytest.raises(BridgeError, match=re.escape(name) if row != "nothing" else re.escape(str(tmp_path))):
        READERS[name](tmp_path / name)


def test_json_has_no_nan_and_configs_may():
    assert parse(b"[NaN, -Infinity]", finite=False)[1] == float("-inf")
    with pytest.raises(ValueError, match="NaN is no number of JSON"):
        parse(b"[NaN]")


# HF folders -----------------------------------------------------------------------------------------------------------


def changed(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def named_by(name):
    def harm(folder):
        state = {key: tensor.clone() for key, tensor in Checkpoint(folder).items()}
        state[name] = torch.zeros(1)
        shutil.rmtree(folder)
        written(state, HF, folder)

    return harm


FOLDERS = {
    "a config of terabytes": (lambda folder: holed(folder / "config.json"), "must have at most"),
    "labels without an end": (lambda folder: changed(folder, num_labels=10**12), "num_labels must be"),
    "layers of a part": (lambda folder: changed(folder, x_config={"num_layers": 10**9}), "num_layers must be"),
    "a tokenizer of terabytes": (lambda folder: holed(folder / "tokenizer.json"), "tokenizer.json has 4398046511104"),
    "a number of digits": (named_by(f"model.layers.{'9' * 5000}.mlp.gate_proj.weight"), "does not fit its config"),
    "digits of other scripts": (named_by("model.layers.\u0660.mlp.gate_proj.weight"), "does not fit its config"),
    "a name for terminals": (named_by("\x1b[2J\nmodel"), "does not fit its config"),
}


@pytest.mark.usefixtures("nobody_waits")
@pytest.mark.parametrize("row", FOLDERS)
def test_hf_folders_are_refused(row, whole, tmp_path):
    harm, message = FOLDERS[row]
    shutil.copytree(whole / "hf", tmp_path / "hf")
    harm(tmp_path / "hf")
    with pytest.raises(BridgeError, match=message) as error:
        convert(tmp_path / "hf", tmp_path / "out", on_event=quiet)
    assert "\x1b" not in str(error.value)
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_file_that_becomes_shorter_is_an_error_and_no_signal(whole, tmp_path):
    shutil.copytree(whole / "hf", tmp_path / "hf")
    checkpoint = Checkpoint(tmp_path / "hf")
    os.truncate(tmp_path / "hf" / "model.safetensors", 5000)
    with pytest.raises(CheckpointError, match=r"has 5000 bytes, and had .* when it was opened"):
        sum(tensor.sum() for tensor in checkpoint.values())


def test_errors_control_no_terminal():
    assert str(BridgeError("a\x1b[2J\u202e\ud800\n\tb")) == "a\\x1b[2J\\u202e\\ud800\n\tb"
    assert printable("\u00e9 \U0001f600") == "\u00e9 \U0001f600"
    assert pickle.loads(pickle.dumps(CheckpointError("\x07"))).args == ("\\x07",)


# checkpoints in the `torch` format, and what is handed on -------------------------------------------------------------


def in_file(change):
    """Damage the content of a rank's file."""

    def harm(path):
        content = torch.load(path, weights_only=True)
        change(content["model"])
        torch.save(content, path)

    return harm


def numbered(name):
    return in_file(lambda model: model.update({name: torch.zeros(1)}))


def scalar(name):
    return in_file(lambda model: model.update({name: torch.tensor(1.0)}))


def packed(path):
    """A record that is small only in the file."""
    torch.save(torch.load(path, weights_only=True), path)  # ours have no checksums
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in records.items():
            archive.writestr(name, data)


FILES = {
    "a FIFO": (fifo, "is a FIFO, expected a file"),
    "packed records": (packed, "records are compressed"),
    "many layers": (
        numbered("decoder.layers.999999999.mlp.x"),
        "layers numbered from 0 on, found 3 of them up to 9999",
    ),
    "many MTP layers": (numbered("mtp.layers.999999999.x"), "layers numbered from 0 on, found 1 of them up to 9999"),
    "a number of digits": (numbered(f"decoder.layers.{'9' * 5000}.x"), "no rule for the mcore parameter"),
    "a key that is a number": (numbered(7), r"found others as \[7\]"),
    "a tensor on no device": (
        in_file(lambda model: model.update(w=torch.zeros(1, device="meta"))),
        r"found others as \['w'\]",
    ),
    "an embedding without dims": (scalar("embedding.word_embeddings.weight"), r"found others as \['embedding"),
    "a sparse tensor": (in_file(lambda model: model.update(w=torch.eye(2).to_sparse())), r"found others as \['w'\]"),
    "a rank far away": (
        lambda path: shutil.copytree(path.parent, path.parent.with_name("mp_rank_999999999")),
        r"no file for tp_rank \[1, 2, 3, 4, 5, 6, 7, 8\]",
    ),
    "a rank of digits": (
        lambda path: shutil.copytree(path.parent, path.parent.with_name(f"mp_rank_{'9' * 99}")),
        "to have the form mp_rank_00_000_000",
    ),
}


@pytest.mark.usefixtures("nobody_waits")
def test_files_of_ranks_are_refused(whole, tmp_path):
    convert(
        whole / "hf", tmp_path / "files", rank_files=rank_files("torch", mb.ParallelDims(), "torch"), on_event=quiet
    )
    for row, (harm, message) in FILES.items():
        shutil.copytree(tmp_path / "files", tmp_path / row)
        harm(tmp_path / row / "release" / "mp_rank_00" / NAME)
        with pytest.raises(CheckpointError, match=message):
            convert(tmp_path / row, tmp_path / "out", on_event=quiet)


@pytest.mark.parametrize(
    "text",
    ["", "[" * 9999, "{}", "[1]", '[{"name": 1, "shape": [1], "dtype": "int8", "sha256": null}]']
    + [f'[{{"name": "a", "shape": {shape}, "dtype": "{dtype}", "sha256": null}}]' for shape, dtype in ODD_ROWS],
)
def test_what_is_no_manifest_is_refused(text):
    with pytest.raises(TransferError, match=r"expected JSON that Manifest\.to_json has written"):
        mb.Manifest.from_json(text)


def test_a_map_copies_nothing_outside_of_its_tensors(tmp_path):
    """An attacker who writes a file also writes its digest."""
    spec, tensor = TensorSpec("a", (4,), torch.int8), EngineTensor("b", (4,), (1,), torch.int8)
    good = EngineMap("e", (spec,), (tensor,), (SliceCopy("a", "b", BoxCopy(0, 0, (Dim(4, 1, 1),)), False),))
    assert not good.problems()
    for box in (BoxCopy(0, 1, (Dim(4, 1, 1),)), BoxCopy(2, 3, (Dim(4, 1, -1),)), BoxCopy(3, 0, (Dim(4, -2, 1),))):
        copied = replace(good, copies=(SliceCopy("a", "b", box, False),))
        filled = replace(good, fills=(SliceFill("b", replace(box, source=0), 0),))
        assert any("out of bounds" in line for line in copied.problems()), box
        assert any("out of bounds" in line for line in filled.problems()) or box.target == 0, box
    good.save(path := tmp_path / "map.json")
    form, _, body = path.read_text().splitlines()
    for old, new in (('"int8"', '"load"'), ("[4,1,1]", "[4,1.0,1]"), ('"engine"', '"other"')):
        changed = body.replace(old, new)
        path.write_text(f"{form}\n{hashlib.sha256(changed.encode()).hexdigest()}\n{changed}\n")
        with pytest.raises(TransferError, match="expected the fields of a map"):
            EngineMap.load(path)
    fifo(path)
    with pytest.raises(TransferError, match="is a FIFO, expected a file"):
        EngineMap.load(path)


def test_a_lock_beside_a_folder_follows_no_link(tmp_path):
    (tmp_path / "mine").write_text("mine")
    out, source = tmp_path / "out", tmp_path / "hf"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (tmp_path / ".out.lock").symlink_to("mine")
    with (
        pytest.raises(CheckpointError, match=r"cannot lock .*\.out\.lock"),
        made_once(out, source),
    ):
        pass
    (tmp_path / ".out.lock").unlink()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / FINGERPRINT).write_text("[" * 9999)
    with pytest.raises(CheckpointError, match="made by this convertor"), made_once(out, source):
        pass
    assert (tmp_path / "mine").read_text() == "mine"


# checkpoints of megatron-core -----------------------------------------------------------------------------------------


def metadata(change):
    """Damage values of the metadata."""

    def harm(folder):
        content = pickle.loads((folder / ".metadata").read_bytes())
        change(content, folder)
        (folder / ".metadata").write_bytes(pickle.dumps(content))

    return harm


def places(**fields):
    """Damage the places of tensors and objects."""

    def change(content, folder):
        for place in content.storage_data.values():
            for name, value in fields.items():
                setattr(place, name, value)

    return metadata(change)


def chunks(*rows):
    """Damage the chunks of one tensor: they get these rows, from and to."""

    def change(content, folder):
        tensor, data = content.state_dict_metadata[KEY], io.BytesIO()
        columns = tensor.size[1]
        tensor.chunks = [
            ChunkStorageMetadata(torch.Size([start, 0]), torch.Size([stop - start, columns])) for start, stop in rows
        ]
        torch.save(torch.ones(rows[0][1] - rows[0][0], columns), data)
        (folder / "__9_0.distcp").write_bytes(data.getvalue())
        for number, (start, _) in enumerate(rows):
            index = MetadataIndex(KEY, torch.Size([start, 0]), number)
            content.storage_data[index] = _StorageInfo("__9_0.distcp", 0, len(data.getvalue()))

    return metadata(change)


def run_by_an_object(content, folder):
    """An extra state that is a program, in an otherwise right file."""
    data = io.BytesIO()
    torch.save([Gadget(folder / "ran")], data)
    (folder / "__9_0.distcp").write_bytes(data.getvalue())
    for index, place in content.storage_data.items():
        if isinstance(content.state_dict_metadata[index.fqn], BytesStorageMetadata):
            place.relative_path, place.offset, place.length = "__9_0.distcp", 0, len(data.getvalue())


def size_of(content, *size):
    content.state_dict_metadata[KEY].size = torch.Size(size)


def set_dtype(content, folder):
    content.state_dict_metadata[KEY].properties.dtype = "float"


def add_key(content, folder):
    content.state_dict_metadata[7] = content.state_dict_metadata[KEY]


ROWS = HF.hidden_size
DIST = {
    "a program": (lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(Gadget(folder / "ran"))), "run code"),
    "a program inside": (
        metadata(lambda content, folder: setattr(content, "planner_data", Gadget(folder / "ran"))),
        "run code",
    ),
    "an object that is a program": (metadata(run_by_an_object), None),
    "metadata that are a FIFO": (lambda folder: fifo(folder / ".metadata"), "is a FIFO"),
    "metadata of terabytes": (lambda folder: holed(folder / ".metadata"), "must have at most"),
    "metadata of another kind": (lambda folder: (folder / ".metadata").write_bytes(pickle.dumps({})), "found dict"),
    "damaged text": (lambda folder: (folder / ".metadata").write_bytes(b"\x80\x05\x8c\xff\xff\xff"), "no readable"),
    "tensors that are none": (
        metadata(lambda content, folder: setattr(content, "state_dict_metadata", None)),
        "expected torch's Metadata",
    ),
    "a key that is a number": (metadata(add_key), "7 is no tensor"),
    "a dtype that is text": (metadata(set_dtype), "has no dtype"),
    "files elsewhere": (places(relative_path="../dist/__0_0.distcp"), r"found '\.\./dist"),
    "files of the root": (places(relative_path="/dev/zero"), "found '/dev/zero'"),
    "a file before its start": (places(offset=-8), r"the place \[-8, "),
    "a file that is a FIFO": (lambda folder: fifo(folder / "__0_0.distcp"), "found folders or FIFOs"),
    "common data that are a FIFO": (lambda folder: fifo(folder / "common.pt"), "found folders or FIFOs"),
    "no common data": (lambda folder: (folder / "common.pt").unlink(), None),
    "rows twice": (chunks((0, ROWS // 2), (0, ROWS // 2)), "only parts of 1 tensor, or parts twice"),
    "rows left out": (chunks((0, ROWS // 2)), "only parts of 1 tensor, or parts twice"),
    "rows before the first": (chunks((-ROWS, ROWS)), "only parts of 1 tensor, or parts twice"),
    "rows without an end": (
        metadata(lambda content, folder: size_of(content, 1 << 50, content.state_dict_metadata[KEY].size[1])),
        "only parts of 1 tensor, or parts twice",
    ),
}


def loaded(folders):
    """The errors of two ranks for each folder."""
    models, _ = built(mb.ParallelDims(pp=2), HF, load_weights=False)
    heard = []
    for folder in folders:
        with pytest.raises(CheckpointError) as error:
            mb.load_checkpoint(models, folder)
        heard.append(str(error.value))
    return heard


def test_checkpoints_of_megatron_core_are_refused_by_loads_and_conversions(whole, tmp_path):
    for row, (harm, _) in DIST.items():
        shutil.copytree(whole / "dist", tmp_path / row)
        harm(tmp_path / row)
    heard = zip(*pool.run(2, loaded, [tmp_path / row for row in DIST]), strict=True)
    for (row, (_, message)), on_ranks in zip(DIST.items(), heard, strict=True):
        assert on_ranks[0] == on_ranks[1]
        assert re.search(message or "Weights only load failed|UnpicklingError|no readable common", on_ranks[0]), (
            row,
            on_ranks[0],
        )
        if message is None:  # a conversion does not read objects
            convert(tmp_path / row, tmp_path / "back", on_event=quiet)
            continue
        with pytest.raises(CheckpointError, match=message):
            convert(tmp_path / row, tmp_path / "out", on_event=quiet)
    assert not [*tmp_path.rglob("ran")]
    assert_exact(tmp_path / "back", Checkpoint(whole / "hf"))


@pytest.mark.parametrize("text", [b"../dist", b"/tmp", b"\xff", "\u00b2".encode(), b"9" * 5000, b"", b"\x1b[2J", b"\0"])
def test_a_tracker_that_names_no_iteration_is_refused(text, whole, tmp_path):
    read_hf(whole / "hf").save_pretrained(tmp_path)
    shutil.copytree(whole / "dist", tmp_path / "dist")
    (tmp_path / TRACKER).write_bytes(text)
    with pytest.raises(CheckpointError, match=f"{TRACKER} must (hold the number of an iter|have at most 100 b)"):
        convert(tmp_path, tmp_path / "out", on_event=quiet)


def boxes(size, *sides):
    """A tensor of this size in boxes: (start, stop) of each side of each."""
    of_torch = [
        ChunkStorageMetadata(*(torch.Size(side) for side in ([a for a, _ in box], [b - a for a, b in box])))
        for box in sides
    ]
    return TensorStorageMetadata(None, torch.Size(size), of_torch)


def test_chunks_cover_a_tensor_once():
    halves = [((0, 2), (0, 4)), ((2, 4), (0, 4))]
    rings = [((0, 1), (0, 2)), ((0, 2), (2, 3)), ((2, 3), (1, 3)), ((1, 3), (0, 1)), ((1, 2), (1, 2))]  # no grid
    assert is_tiled(boxes((4, 4), *halves))
    assert is_tiled(boxes((3, 3), *rings))
    assert is_tiled(boxes((), ()))
    assert is_tiled(boxes((0, 4)))
    assert is_tiled(boxes((4, 4), *halves, ((1, 1), (0, 4))))
    wrong = [halves[:1], [halves[0]] * 2, rings, [*halves, halves[0]], [((0, 4), (0, 2)), ((0, 4), (1, 3))]]
    assert not any(is_tiled(boxes((4, 4), *some)) for some in wrong)
    of_its_size = [((0, 2), (0, 2)), *rings[1:3], ((1, 2), (0, 1))]
    assert not is_tiled(boxes((3, 3), *of_its_size))
