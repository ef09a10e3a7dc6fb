"""Damaged folders of checkpoints: if transformers loads a folder completely, we load equal bits; others are refused.

A folder is drawn whole and then damaged in a place or two: tensors, the index, headers, and the files themselves.
Differences to transformers are listed by the message of the library that refuses the folder.
"""

import contextlib
import json
import os
import pickle
import re
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import event, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM

import mcore_bridge as mb
from mcore_bridge.convert.convert import convert
from mcore_bridge.errors import BridgeError, CheckpointError
from mcore_bridge.weights.files.hf_folder import INDEX, SINGLE, Checkpoint
from mcore_bridge.weights.load import load_hf_weights
from mcore_bridge.weights.provenance import head_of
from tests.support import damage, fake_mesh
from tests.support.damage import VALUES, File, Pairs, dumped
from tests.support.strategies import random_state, tiny

HF = tiny("llama", vocab_size=16, num_hidden_layers=1, hidden_size=16, intermediate_size=8, head_dim=8)
STATE = random_state(HF)
NAMES, ONE, TWO = sorted(STATE), "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
OUTSIDE = "outside.safetensors"
"""A complete file outside of the folder, with the tensors of the folder's first shard."""

STRICTER = {
    r"expected each key once, found \d+ twice": "JSON takes the last, and transformers with it",
    r"found \d+ in two: ": "it takes the one that it reads last",
    r"expected a \*\.safetensors file in the same folder for each tensor": "it follows any path",
    r"lists \d+ tensors? that the files named there lack": "it finds a tensor in another file than the index says",
    r"which cannot hold all its values": "it casts",
    r"is float8_\w+ and has no scale": "it takes codes without a scale for values",
    r"unexpected \['(embed_tokens|layers|norm)\.": "it takes names without the prefix of the base model too",
    r"model\.safetensors(\.index\.json)? is a (folder|device), expected a file": "it looks for other weights",
    r"cannot open .*model\.safetensors(\.index\.json)?: No such file": "the same for a link to nothing",
}
"""Our errors for folders that transformers loads completely, each with the behaviour of transformers."""
LAXER = {
    r"KeyError: 'metadata'": "an index needs no metadata",
    r"TypeError: (.*item assignment|list indices)": "nor must these be an object",
    r"Error no file named": "any *.safetensors are read where there is no index",
}
"""Errors of transformers for folders that we load, each with our reason."""
if transformers.__version__ < "5":
    LAXER[r"^\{'missing_keys': \[[^]]*\]\}$"] = "it misses what the index leaves out, and 5 takes it"
    LAXER[r"not contain the valid metadata|File metadata is not"] = (
        "it wants a framework named in a header, and 5 does not"
    )


@dataclass
class Folder:
    """The content of a folder, before its files are damaged."""

    shards: dict[str, dict[str, Tensor]]
    index: Any
    """The index as ``Pairs``, or its replacement; None without an index."""
    text: bytes | None = None
    """The text that replaces the index."""

    def __repr__(self) -> str:
        """Show dtypes and shapes of tensors, since their values are long."""
        shards = {
            file: {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
            for file, tensors in self.shards.items()
        }
        return f"Folder({shards}, {self.index}, {self.text!r})"

    @property
    def map(self) -> Any:
        """The ``weight_map``, if it still exists."""
        found = [value for key, value in self.index if key == "weight_map"] if isinstance(self.index, Pairs) else []
        return found[0] if found and isinstance(found[0], Pairs) else Pairs()

    def write(self, path: Path) -> None:
        for name, tensors in self.shards.items():
            save_file({key: tensor.clone() for key, tensor in tensors.items()}, path / name, metadata={"format": "pt"})
        if self.index is not None:
            (path / INDEX).write_bytes(dumped(self.index).encode() if self.text is None else self.text)
        shutil.copy(path / min(self.shards), path.parent / OUTSIDE)


@st.composite
def whole_folders(draw: Any) -> Folder:
    """Draw one file, or two files with or without an index."""
    kind = draw(st.sampled_from(["sharded", "sharded", "sharded", "single", "no index", "both"]))
    if kind == "single":
        return Folder({SINGLE: dict(STATE)}, None)
    first = NAMES[:: draw(st.integers(2, len(NAMES)))]
    shards = {ONE: {key: STATE[key] for key in NAMES if key in first}}
    shards[TWO] = {key: STATE[key] for key in NAMES if key not in first}
    if kind == "both":
        shards[SINGLE] = dict(STATE)
    listed = Pairs([key, ONE if key in first else TWO] for key in NAMES)
    index = Pairs([["metadata", Pairs([["total_size", 0]])], ["weight_map", listed]])
    return Folder(shards, None if kind == "no index" else index)


# damage to written files ---------------------------------------------------------------------------------------------


def a_tensor(draw: Any, folder: Folder) -> tuple[dict[str, Tensor], str]:
    """Draw a tensor of some shard."""
    shard = folder.shards[draw(st.sampled_from(sorted(folder.shards)))]
    return shard, draw(st.sampled_from(sorted(shard)))


def reshape(draw: Any, folder: Folder) -> None:
    """Change the shape, with an equal or another number of values."""
    shard, name = a_tensor(draw, folder)
    shard[name] = draw(st.sampled_from([shard[name].T, shard[name].flatten(), shard[name][:-1], shard[name][None]]))
    shard[name] = shard[name].contiguous()


def cast(draw: Any, folder: Folder) -> None:
    dtypes = [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.float8_e4m3fn, torch.complex64]
    shard, name = a_tensor(draw, folder)
    shard[name] = shard[name].to(draw(st.sampled_from(dtypes)))


def rename(draw: Any, folder: Folder) -> None:
    shard, name = a_tensor(draw, folder)
    new = draw(st.sampled_from([f"{name}.old", name.removeprefix("model."), "", "a/b", "model.layers.7.x"]))
    shard[new] = shard.pop(name)


def drop(draw: Any, folder: Folder) -> None:
    shard, name = a_tensor(draw, folder)
    if len(shard) > 1:
        shard.pop(name)


def copy_to_another(draw: Any, folder: Folder) -> None:
    """The index may name it, or may not."""
    shard, name = a_tensor(draw, folder)
    other = folder.shards.setdefault(draw(st.sampled_from([ONE, TWO, "stale.safetensors"])), {})
    other[name] = -shard[name]


def change_index(draw: Any, folder: Folder) -> None:
    """One entry, or several."""
    places = [
        ONE,
        TWO,
        "missing.safetensors",
        f"../{OUTSIDE}",
        f"hf/../../{OUTSIDE}",
        f"./{ONE}",
        "",
        ".",
        "\0",
        "x.bin",
    ]
    for pair in folder.map:
        if draw(st.integers(0, 4)) == 0:
            pair[1] = draw(st.sampled_from([*places, "ABSOLUTE", *VALUES]))


def lead_out(draw: Any, folder: Folder) -> None:
    """Let the index point to equal tensors in a file outside of the folder."""
    place = draw(st.sampled_from([f"../{OUTSIDE}", f"../hf/../{OUTSIDE}", "ABSOLUTE"]))
    for pair in folder.map:
        pair[1] = place if pair[1] == ONE else pair[1]


def drop_from_index(draw: Any, folder: Folder) -> None:
    for pair in folder.map[draw(st.integers(0, len(NAMES) - 1)) :][:1]:
        folder.map.remove(pair)


def add_to_index(draw: Any, folder: Folder) -> None:
    """Add a name to the index, either an existing one or a new one."""
    folder.map.append([draw(st.sampled_from([*NAMES[:2], "other"])), draw(st.sampled_from([ONE, TWO]))])


def harm_index(draw: Any, folder: Folder) -> None:
    """Damage an index like a header: change any value, repeat any key or remove it."""
    if isinstance(folder.index, Pairs):
        holder = File(folder.index, b"")
        draw(st.sampled_from([damage.replace, damage.remove, damage.repeat, damage.add, damage.rename]))(draw, holder)


def rewrite_index(draw: Any, folder: Folder) -> None:
    text = dumped(folder.index).encode()
    deep, pointer = b"[" * 100_000, b"version https://git-lfs.github.com/spec/v1\n"
    some = [
        b"",
        b"null",
        b"[]",
        b"3",
        text[:-9],
        b"\xef\xbb\xbf" + text,
        text.decode().encode("utf-16"),
        text + b"\xff",
    ]
    folder.text = draw(st.sampled_from([*some, deep, pointer]))


WRITTEN = [reshape, cast, rename, drop, copy_to_another]
INDEXED = [change_index, lead_out, drop_from_index, add_to_index, harm_index, rewrite_index]


# harms to files -------------------------------------------------------------------------------------------------------


def cut(draw: Any, path: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, draw(st.sampled_from([0, 1, 7, 8, 20, size // 2, size - 1, size + 1, size + 4096])))


def flip(draw: Any, path: Path) -> None:
    data = bytearray(path.read_bytes()) or bytearray(1)
    data[draw(st.integers(0, min(len(data), 300) - 1))] = draw(st.integers(0, 255))
    path.write_bytes(data)


def harm_header(draw: Any, path: Path) -> None:
    with contextlib.suppress(Exception):  # it was damaged before
        file = File.of(path.read_bytes())
        draw(st.sampled_from(damage.HARMS))(draw, file)
        path.write_bytes(file.packed())


def put_pointer(draw: Any, path: Path) -> None:
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n")


def put_other(draw: Any, path: Path) -> None:
    """Replace a file by something else with its name, or by a link to it, which is allowed."""
    kinds = ["nothing", "fifo", "folder", "device", "dangling", "link", "link", "outside"]
    kind = draw(st.sampled_from(kinds))
    if kind == "link":
        path.rename(path.with_name(f"{path.name}.blob"))
        path.symlink_to(f"{path.name}.blob")
        return
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind != "nothing":
        path.symlink_to({"device": "/dev/null", "dangling": "nowhere", "outside": f"../{OUTSIDE}"}[kind])


FILES = [cut, flip, harm_header, harm_header, put_pointer, put_other]


# the comparison -------------------------------------------------------------------------------------------------------


def by_transformers(path: Path) -> dict[str, Tensor] | str:
    """The weights, or the reason why they are not exactly those of the checkpoint."""
    try:
        model, found = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    wrong = {kind: sorted(names) for kind, names in found.items() if names}
    return str(wrong) if wrong else model.state_dict()


def by_us(source: Path | dict[str, Tensor], model: Any) -> dict[str, Tensor] | str:
    """The tensors of our model after the load, or the message of the refusal."""
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    try:
        load_hf_weights(model, source)
    except BridgeError as error:
        return str(error)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_not_converted(path: Path) -> None:
    """A folder that is not loaded is not converted, and nothing is left of the attempt.

    A folder without a head is not loaded as a causal LM, which the tests request, but it is converted.
    """
    with contextlib.suppress(BridgeError, OSError, ValueError):
        if head_of(path) == "none":
            return
    before = sorted(each.name for each in path.parent.iterdir())
    with pytest.raises(BridgeError):
        convert(path, path.parent / "target", on_event=lambda *event: None)
    assert sorted(each.name for each in path.parent.iterdir()) == before


def reason_to_refuse(path: Path) -> str:
    """The folders that we refuse by our own rule, computed in another way."""
    if (path / SINGLE).is_file():
        names = {SINGLE}
    elif (path / INDEX).is_file():
        try:
            index = json.loads((path / INDEX).read_bytes(), object_pairs_hook=Pairs)
            files = [value for key, files in index if key == "weight_map" for _, value in files]
            if any(has_a_key_twice(each) for each in damage.objects([*index, *map(list, index)])):
                return "a key twice in the index"
            names = set(files)
        except (ValueError, TypeError, RecursionError):
            return "an index that says nothing"
        if any("/" in name for name in names if isinstance(name, str)):
            return "an index that leads out of the folder"
    else:
        names = {each.name for each in path.glob("*.safetensors")}
    found: list[str] = []
    for file in (path / name for name in names if isinstance(name, str)):
        if os.path.isfile(file):  # reading a FIFO would wait forever
            with contextlib.suppress(SafetensorError), safe_open(file, "pt") as opened:
                found += opened.keys()
    return "a tensor in two files" if len(found) > len(set(found)) else ""


def has_a_key_twice(pairs: Pairs) -> bool:
    keys = [key for key, _ in pairs]
    return len(keys) > len(set(keys))


def listed(reasons: dict[str, str], said: str) -> bool:
    return any(re.search(reason, said) for reason in reasons)


def compare(path: Path, model: Any) -> str:
    """Compare our load with transformers', and return the outcome."""
    ours = by_us(path, model)
    if isinstance(ours, str):
        assert_not_converted(path)
    if reason := reason_to_refuse(path):
        assert isinstance(ours, str), reason
    if any(stat.S_ISFIFO(each.lstat().st_mode) for each in path.iterdir()):  # transformers might wait forever
        return "a FIFO"
    theirs = by_transformers(path)
    if isinstance(theirs, str):
        assert isinstance(ours, str) or listed(LAXER, theirs), f"we load it, and transformers says: {theirs}"
        return "refused" if isinstance(ours, str) else "laxer"
    if isinstance(ours, str):
        assert listed(STRICTER, ours), f"transformers loads it, and we say: {ours}"
        return "stricter"
    same = by_us(theirs, model)
    assert all(torch.equal(ours[name], tensor) for name, tensor in same.items())
    return "loaded"


@pytest.fixture(scope="module")
def model() -> Any:
    """A model on one rank, which all folders are loaded into."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with fake_mesh.rank_of(mb.ParallelDims(), 0, 1):
        (model,) = mb.build_model(HF, load_weights=False, device="cpu", dtype=torch.float32)
    return model


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parent of the folders. It has a file that no folder may read."""
    return tmp_path_factory.mktemp("folders")


@settings(max_examples=4 * settings.default.max_examples)
@given(data=st.data(), folder=whole_folders())
def test_any_folder_is_loaded_as_by_transformers_or_refused(work, model, data, folder):
    path = work / "hf"
    shutil.rmtree(path, ignore_errors=True)
    HF.save_pretrained(path)
    kinds = data.draw(
        st.sampled_from([[WRITTEN], [INDEXED], [INDEXED, WRITTEN], [FILES], [FILES], [FILES, INDEXED], []])
    )
    for harms in kinds:
        if harms is not FILES and (folder.index is not None or harms is WRITTEN):
            data.draw(st.sampled_from(harms))(data.draw, folder)
    for pair in folder.map:
        pair[1] = str(work / OUTSIDE) if pair[1] == "ABSOLUTE" else pair[1]
    folder.write(path)
    if FILES in kinds:
        names = sorted(each.name for each in path.iterdir() if each.name != "config.json")
        data.draw(st.sampled_from(FILES))(data.draw, path / data.draw(st.sampled_from(names)))
    event(compare(path, model))


# permissions ----------------------------------------------------------------------------------------------------------


def without_privileges(function: Any, *args: Any) -> Any:
    """The result of a function in a process without the rights of root."""
    if os.geteuid() != 0:
        return function(*args)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            found = function(*args)
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        with contextlib.suppress(BaseException):
            os.write(writer, pickle.dumps(found))
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    return pickle.loads(data)


def refusals(path: Path) -> list[str]:
    """The error message for a folder, with its type if it is no error of this library."""
    found = []
    for attempt in (lambda: Checkpoint(path), lambda: convert(path, path / "target", on_event=lambda *event: None)):
        try:
            attempt()
            found.append("nothing")
        except CheckpointError as error:
            found.append(str(error))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize(
    ("name", "mode", "message"),
    [
        (ONE, 0o000, rf"cannot open .*{ONE}: Permission denied"),
        (INDEX, 0o000, rf"cannot open .*{INDEX}: Permission denied"),
        (".", 0o000, r"cannot list .*hf: Permission denied"),
        (".", 0o444, r"cannot open .*safetensors: Permission denied"),
        ("..", 0o000, r"(no folder|cannot list) .*hf"),
    ],
)
def test_what_may_not_be_read_is_refused_and_named(name, mode, message):
    with tempfile.TemporaryDirectory() as top:
        path = Path(top) / "above" / "hf"
        HF.save_pretrained(path)
        Folder({ONE: STATE}, Pairs([["weight_map", Pairs([key, ONE] for key in NAMES)]])).write(path)
        refusals(path / "nothing")  # it imports files that a process without privileges may not read
        os.chmod(top, 0o755)
        os.chmod(path / name, mode)
        said = without_privileges(refusals, path)
        os.chmod(path.parent, 0o755)
        os.chmod(path, 0o755)
        assert not (path / "target").exists()
    for each in said:
        assert re.search(message, each), said
