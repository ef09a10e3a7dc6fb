"""Headers of files: what the ``safetensors`` library takes we take with its bits, and what it refuses we refuse.

The library, pinned in ``constraints/``, is the oracle. Headers are drawn whole and then harmed in up to three places.
A rule is our own: a key that is there twice is refused.
"""

import copy
import json
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from mcore_bridge.commands.convert import convert
from mcore_bridge.errors import CheckpointError
from mcore_bridge.weights.checkpoint import Checkpoint
from mcore_bridge.weights.safetensors_file import DTYPES, SafetensorsFile
from tests.strategies import random_state, tiny

BITS = {**{name: 8 * dtype.itemsize for name, dtype in DTYPES.items()}, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
EXAMPLES = 15 * settings.default.max_examples


class Pairs(list[Any]):
    """An object of JSON, as a list of [key, value]: a key may be there twice."""


class Text(str):
    """JSON as it is."""


def dumped(value: Any) -> str:
    """JSON of a tree of ``Pairs``, lists and values."""
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{json.dumps(key)}:{dumped(each)}" for key, each in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dumped, value)) + "]"
    return value if isinstance(value, Text) else json.dumps(value)


@dataclass
class File:
    """What a file is made of."""

    header: Pairs
    data: bytes
    before: bytes = b""
    after: bytes = b""
    longer: int = 0

    def text(self) -> bytes:
        return self.before + dumped(self.header).encode() + self.after

    def bytes(self) -> bytes:
        text = self.text()
        return struct.pack("<Q", (len(text) + self.longer) % 2**64) + text + self.data


@st.composite
def whole_files(draw: Any) -> File:
    """Any dtypes and shapes, in any order."""
    names = draw(st.lists(st.sampled_from(["a", "b", "", "\0", "\u00e9", '"', "x" * 50]), max_size=4, unique=True))
    header, stop = [], 0
    for name in names:
        dtype = draw(st.sampled_from(sorted(BITS)))
        shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 8]), max_size=3))
        if BITS[dtype] * math.prod(shape) % 8:
            shape.append(4)
        start, stop = stop, stop + BITS[dtype] * math.prod(shape) // 8
        header.append([name, Pairs([["dtype", dtype], ["shape", shape], ["data_offsets", [start, stop]]])])
    metadata = [["__metadata__", Pairs([["format", "pt"]])]] if draw(st.booleans()) else []
    return File(Pairs([*metadata, *draw(st.permutations(header))]), bytes(index % 251 for index in range(stop)))


@st.composite
def files(draw: Any) -> bytes:
    """Whole ones, harmed in up to three places."""
    file = draw(whole_files())
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3, 0]))):
        draw(st.sampled_from(HARMS))(draw, file)
    found = bytearray(file.bytes())
    for place, value in draw(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 255)), max_size=1)):
        if draw(st.integers(0, 4)) == 0:
            found[place % len(found)] = value
    return bytes(found)


# harms ----------------------------------------------------------------------------------------------------------------

NUMBERS = [0, 1, 2, 8, 64, -1, -8, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**300, 10**400]
DEEP = [Text("[" * depth + "]" * depth) for depth in (1, 120, 130, 5000)]
ODD = [1.0, 0.5, Text("-0"), Text("8.0"), Text("8e0"), Text("08"), float("nan"), Text("1e999"), None, True]
STRINGS = ["", "U8", "F6_E2M3", "C128", "u8", "\0", "\U0001f600", Text('"\\ud800"'), Text('"\\/"'), Text("'a'")]
TREES = [[], [8, 8], [0, 8], Pairs(), Pairs([["U8", None]]), Pairs([["U8", 1]]), Pairs([["k", 1], ["k", 2]])]
VALUES = [*NUMBERS, *ODD, *STRINGS, *TREES, *DEEP]
KEYS = ["a", "b", "dtype", "shape", "data_offsets", "__metadata__", "more"]


def objects(tree: Any) -> Iterator[Pairs]:
    """All of a tree."""
    if isinstance(tree, list):
        yield from [tree] if isinstance(tree, Pairs) else []
        for each in tree:
            yield from objects(each)


def places(tree: Any) -> Iterator[tuple[list[Any], int]]:
    """Where the values of a tree are: in which list, and the how many-th."""
    for index, each in enumerate(tree if isinstance(tree, list) else ()):
        if isinstance(tree, Pairs):
            yield each, 1
            yield from places(each[1])
        else:
            yield tree, index
            yield from places(each)


def drawn(draw: Any, found: Iterator[Any]) -> list[Any]:
    """One of them; none where there is none."""
    some = list(found)
    return [draw(st.sampled_from(some))] if some else []


def a_value(draw: Any) -> Any:
    """One of ``VALUES``, which later harms may change."""
    return copy.deepcopy(draw(st.sampled_from(VALUES)))


def shift_number(draw: Any, file: File) -> None:
    """So that ranges overlap, leave holes, or are negative, and shapes do not fit."""
    numbers = ((holder, index) for holder, index in places(file.header) if type(holder[index]) is int)
    for holder, index in drawn(draw, numbers):
        holder[index] += draw(st.sampled_from([-64, -8, -1, 1, 8, 64]))


def shift_range(draw: Any, file: File) -> None:
    """Both ends alike, so that the size stays right."""
    ranges = (pair for each in objects(file.header) for pair in each if pair[0] == "data_offsets")
    for pair in drawn(draw, ranges):
        if isinstance(pair[1], list) and all(type(each) is int for each in pair[1]):
            by = draw(st.sampled_from([-100, -8, -1, 1, 8]))
            pair[1] = [each + by for each in pair[1]]


def replace(draw: Any, file: File) -> None:
    for holder, index in drawn(draw, places(file.header)):
        holder[index] = a_value(draw)


def remove(draw: Any, file: File) -> None:
    for pairs in drawn(draw, objects(file.header)):
        for pair in drawn(draw, iter(pairs)):
            pairs.remove(pair)


def repeat(draw: Any, file: File) -> None:
    """A key once more, with the same value or another: mostly of a tensor, as the library refuses a field twice."""
    for pairs in [file.header] if draw(st.booleans()) else drawn(draw, objects(file.header)):
        for key, value in drawn(draw, iter(pairs)):
            again = value if draw(st.integers(0, 3)) else a_value(draw)
            pairs.insert(draw(st.integers(0, len(pairs))), [key, copy.deepcopy(again)])


def add(draw: Any, file: File) -> None:
    for pairs in drawn(draw, objects(file.header)):
        pairs.append([draw(st.sampled_from(KEYS)), a_value(draw)])


def rename(draw: Any, file: File) -> None:
    for pairs in drawn(draw, objects(file.header)):
        for pair in drawn(draw, iter(pairs)):
            pair[0] = draw(st.sampled_from(KEYS))


def write_as_array(draw: Any, file: File) -> None:
    """The fields of an entry without their keys, as the library takes them too."""
    for pair in drawn(draw, iter(file.header)):
        if isinstance(pair[1], Pairs):
            pair[1] = [value for _, value in pair[1]]


def change_data(draw: Any, file: File) -> None:
    """Shorter or longer than the header says."""
    by = draw(st.sampled_from([-9, -1, 1, 9]))
    file.data = file.data[:by] if by < 0 else file.data + bytes(by)


def change_length(draw: Any, file: File) -> None:
    """Of the header, as the first 8 bytes have it."""
    file.longer = draw(st.sampled_from([-8, -1, 1, 8, 100_000_001, 2**63, 2**64 - 1]))


def surround(draw: Any, file: File) -> None:
    kinds = st.sampled_from([b"", b" \n", b"\t", b"\0", b"\xef\xbb\xbf", b"\xff", b"{}", b"[", b","])
    file.before, file.after = draw(kinds), draw(kinds)


HARMS: list[Callable[[Any, File], None]] = [
    *(shift_number, shift_range, replace, remove, repeat, add, rename, write_as_array, change_data, change_length),
    surround,
]


# the comparison -------------------------------------------------------------------------------------------------------


def told_by_library(path: Path) -> dict[str, Any] | None:
    """Its tensors, or what it says of one; None where it refuses the file."""
    found: dict[str, Any] = {}
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                try:
                    found[name] = file.get_tensor(name)
                except (SafetensorError, RuntimeError, TypeError, OverflowError, ValueError) as error:
                    found[name] = error
    except SafetensorError:
        return None
    return found


def has_a_key_twice(data: bytes) -> bool:
    """Whether an object of a header that the library has taken has one."""

    def is_new(pairs: list[tuple[str, Any]]) -> None:
        twice.extend(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))

    twice: list[str] = []
    json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]], object_pairs_hook=is_new)
    return bool(twice)


def assert_refused(path: Path, target: Path) -> None:
    """By a message with the file's name, and by ``convert`` before it makes anything."""
    for attempt in (lambda: SafetensorsFile(path), lambda: convert(path.parent, target, on_event=lambda *event: None)):
        with pytest.raises(CheckpointError, match=path.name):
            attempt()
    assert [each.name for each in target.parent.iterdir()] == ["hf"]


def compare(data: bytes, work: Path) -> str:
    """Hold ourselves against the library, and say what came of it."""
    path = work / "hf" / "model.safetensors"
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    expected = told_by_library(path)
    if expected is None or has_a_key_twice(data):
        assert_refused(path, work / "target")
        return "refused" if expected is None else "twice"
    found = Checkpoint(path.parent)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        if isinstance(tensor, Exception):
            with pytest.raises(CheckpointError, match=r"not supported"):
                found[name]
            continue
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].flatten().view(torch.uint8).equal(tensor.flatten().view(torch.uint8))
    return "taken"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a HF folder in it that has a config."""
    path = tmp_path_factory.mktemp("headers")
    HF.save_pretrained(path / "hf")
    return path


HF = tiny("llama", num_hidden_layers=1)
TWO = Pairs([["dtype", "U8"], ["shape", [2]], ["data_offsets", [0, 2]]])


@settings(max_examples=EXAMPLES)
@given(files())
@example(File(Pairs([["a", TWO], ["a", TWO]]), b"01").bytes())
@example(File(Pairs([["a", Pairs([*TWO, ["more", Pairs([["k", 1], ["k", 2]])]])]]), b"01").bytes())
@example(File(Pairs([["__metadata__", Pairs([["a", "b"], ["a", "b"]])], ["a", TWO]]), b"01").bytes())
def test_any_header_is_taken_or_refused_as_by_the_library(work, data):
    event(compare(data, work))


def test_what_the_library_takes_in_odd_spellings_loads_and_converts(work):
    """Entries as arrays, dtypes as keys, unknown fields, in another order and with space around."""
    state, path = random_state(HF), work / "hf" / "model.safetensors"
    save_file(state, path)
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    odd = {
        0: lambda fields: Pairs([*reversed(fields.items()), ("more", {"deep": [[1e3]]})]),
        1: lambda fields: [*fields.values()],
        2: lambda fields: Pairs({**fields, "dtype": Pairs([(fields["dtype"], None)])}.items()),
    }
    header = [(name, odd[index % 3](fields)) for index, (name, fields) in enumerate(json.loads(data[8:end]).items())]
    file = File(Pairs([("__metadata__", None), *reversed(header)]), data[end:], before=b" \n", after=b"\t ")
    path.write_bytes(file.bytes())
    assert load_file(path).keys() == state.keys()
    convert(path.parent, work / "dist", on_event=lambda *event: None)
    convert(work / "dist", work / "back", on_event=lambda *event: None)
    for folder in (path.parent, work / "back"):
        found = Checkpoint(folder)
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
