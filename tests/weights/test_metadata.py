"""The metadata of a checkpoint of megatron-core: the names that its pickle may contain, and harmful pickles."""

import importlib
import os
import pickle
from dataclasses import is_dataclass
from enum import Enum

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mcore_bridge.errors import CheckpointError
from mcore_bridge.weights.dist_checkpoint import metadata
from mcore_bridge.weights.dist_checkpoint.metadata import NAME, is_tiled, read_metadata, unpickled, without_code

MODULES = [f"torch.distributed.checkpoint.{name}" for name in ("metadata", "planner", "filesystem", "storage")]


def named(module, name):
    """A pickle that refers to this name, which may have several dots."""
    texts = [b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)]
    return b"\x80\x04" + b"".join(texts) + b"\x93."


def is_data(value):
    return isinstance(value, type) and (is_dataclass(value) or issubclass(value, Enum))


@pytest.mark.parametrize("module", MODULES)
def test_of_torchs_modules_a_pickle_names_data_alone(module):
    """Torch's modules import functions and other modules, and a name with dots reaches methods of a class, and more."""
    values = {name: value for name, value in vars(importlib.import_module(module)).items() if len(name) < 200}
    data = {name for name, value in values.items() if is_data(value)}
    assert data
    assert any(callable(value) for name, value in values.items() if name not in data)
    for name in data:
        assert unpickled(named(module, name)) is values[name]
    for name in (*(values.keys() - data), *(f"{name}.__init__" for name in data), "os.system", "pickle.loads"):
        with pytest.raises(pickle.UnpicklingError, match="might run code"):
            unpickled(named(module, name))


OTHERS = [("builtins", "eval"), ("os", "system"), ("pathlib", "Path.unlink"), ("collections", "namedtuple")]
OTHERS += [("torch", "load"), ("numpy", "load"), ("torch.serialization", "load"), ("torch.distributed", "Enum")]


@pytest.mark.parametrize(("module", "name"), OTHERS)
def test_of_other_modules_it_names_what_is_on_a_list(module, name):
    with pytest.raises(pickle.UnpicklingError, match=rf"it names {module}\.{name}, which might run code"):
        unpickled(named(module, name))


def test_it_may_have_sizes_dtypes_and_objects_of_torch(tmp_path):
    values = [torch.Size([2, 3]), torch.bfloat16, TensorProperties(), content(), tmp_path]
    assert unpickled(pickle.dumps(values[:3])) == values[:3]
    assert unpickled(pickle.dumps(values[3])).storage_data == values[3].storage_data
    assert unpickled(pickle.dumps(values[4])) == tmp_path


def content():
    """Metadata of one tensor in two chunks, and of one object."""
    sides = [((0, 0), (2, 3)), ((2, 0), (2, 3))]
    chunks = [ChunkStorageMetadata(*map(torch.Size, side)) for side in sides]
    entry = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([4, 3]), chunks)
    places = {
        MetadataIndex("a", chunk.offsets, i): _StorageInfo("__0_0.distcp", 8, 24) for i, chunk in enumerate(chunks)
    }
    places[MetadataIndex("b")] = _StorageInfo("__0_1.distcp", 0, 1)
    return Metadata({"a": entry, "b": BytesStorageMetadata()}, storage_data=places)


def of_tensor(name, value):
    return lambda whole: setattr(whole.state_dict_metadata["a"], name, value)


def of_chunk(name, value):
    return lambda whole: setattr(whole.state_dict_metadata["a"].chunks[1], name, value)


def of_place(name, value):
    return lambda whole: setattr(whole.storage_data[MetadataIndex("b")], name, value)


def without_place(whole):
    whole.storage_data[MetadataIndex("b")] = MetadataIndex("b")


def under_text(whole):
    whole.storage_data["b"] = _StorageInfo("__0_1.distcp", 0, 1)


BOXES, PLACE, FILE = (
    "'a' has no dtype, or chunks that are no boxes",
    "has no place in a file",
    "expected names of files",
)
HARMS = [
    (lambda whole: whole.state_dict_metadata.update({7: BytesStorageMetadata()}), "7 is no tensor and no object"),
    (lambda whole: whole.state_dict_metadata.update(b=MetadataIndex("b")), "'b' is no tensor and no object"),
    (lambda whole: setattr(whole, "state_dict_metadata", []), "with its two dicts, found Metadata"),
    (lambda whole: setattr(whole, "storage_data", None), "with its two dicts, found Metadata"),
    (of_tensor("properties", torch.Size([1])), BOXES),
    (of_tensor("size", [4, 3]), BOXES),
    (of_tensor("size", torch.Size([4])), BOXES),
    (of_tensor("chunks", None), BOXES),
    (of_tensor("chunks", [7]), BOXES),
    (of_chunk("offsets", [2, 0]), BOXES),
    (of_chunk("offsets", torch.Size([2])), BOXES),
    (of_chunk("sizes", [2, 3]), BOXES),
    (of_chunk("sizes", torch.Size([2, 3, 1])), BOXES),
    (without_place, PLACE),
    (under_text, PLACE),
    *((of_place("relative_path", name), FILE) for name in (7, "", ".", "..", "/a", "a/b", "../a", "a\0")),
    (of_place("offset", -1), r"'b' has the place \[-1, 1\] in __0_1"),
    (of_place("offset", "0"), r"'b' has the place \[None, 1\] in __0_1"),
    (of_place("length", -1), r"'b' has the place \[0, -1\] in __0_1"),
    (of_place("length", 1.0), r"'b' has the place \[0, None\] in __0_1"),
]


def test_each_thing_in_it_that_no_writer_of_torch_writes_is_refused(tmp_path):
    (tmp_path / NAME).write_bytes(pickle.dumps(content()))
    assert read_metadata(tmp_path).state_dict_metadata == content().state_dict_metadata
    for harm, message in HARMS:
        whole = content()
        harm(whole)
        (tmp_path / NAME).write_bytes(pickle.dumps(whole))
        with pytest.raises(CheckpointError, match=f"is damaged: .*{message}.*; copy the folder again"):
            read_metadata(tmp_path)
    alike = BytesStorageMetadata()
    vars(alike).update(vars(content()))
    unreadable = (b"\x80", r"no readable .metadata .\w+Error: ")
    for data, message in ((pickle.dumps(alike), "found BytesStorageMetadata"), unreadable):
        (tmp_path / NAME).write_bytes(data)
        with pytest.raises(CheckpointError, match=message):
            read_metadata(tmp_path)


def boxes(size, *sides):
    """A tensor of this size in chunks with these offsets and sizes."""
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in sides]
    return TensorStorageMetadata(TensorProperties(), torch.Size(size), chunks)


def test_chunks_that_add_up_to_a_tensor_may_lie_outside_of_it(monkeypatch):
    """Each of these has as many elements as the tensor."""
    assert is_tiled(boxes([4], ([0], [3]), ([3], [1])))
    assert not is_tiled(boxes([2, 2], ([0, 0], [2, 1]), ([0, 1], [1, 1]), ([1, 2], [-1, -1])))
    for sides in ((([-1], [4]),), (([1], [4]),), (([0], [5]), ([2], [-1])), (([0], [2]), ([0], [2]))):
        assert not is_tiled(boxes([4], *sides)), sides
    rings = [([0, 0], [1, 2]), ([0, 2], [2, 1]), ([2, 1], [1, 2]), ([1, 0], [2, 1]), ([1, 1], [1, 1])]
    for most in (5, 4):  # comparing too many pairs would take forever
        monkeypatch.setattr(metadata, "_MOST_ODD", most)
        assert is_tiled(boxes([3, 3], *rings)) == (most == 5)


FORCES, FORBIDS = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


def variables():
    return [os.environ.get(name) for name in (FORCES, FORBIDS)]


@pytest.mark.parametrize("own", [[None, None], ["yes", None], [None, "1"]], ids=["none", "forces", "forbids"])
def test_a_variable_of_the_user_is_left_alone(own, monkeypatch):
    for name, value in zip((FORCES, FORBIDS), own, strict=True):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    inside = []

    def fail():
        with without_code():
            inside.append(variables())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert inside == [own if any(own) else ["1", None]]
    assert variables() == own
