"""Damaged safetensors files: whole files are drawn, and then changed in a few places."""

import copy
import json
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from mcore_bridge.weights.files.safetensors import DTYPES

BITS = {**{name: 8 * dtype.itemsize for name, dtype in DTYPES.items()}, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


class Pairs(list[Any]):
    """An object of JSON, as a list of [key, value], in which a key may be repeated."""


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
    """The parts of a file."""

    header: Pairs
    data: bytes
    before: bytes = b""
    after: bytes = b""
    longer: int = 0

    def text(self) -> bytes:
        return self.before + dumped(self.header).encode() + self.after

    def packed(self) -> bytes:
        text = self.text()
        return struct.pack("<Q", (len(text) + self.longer) % 2**64) + text + self.data

    @classmethod
    def of(cls, found: bytes) -> "File":
        """Read the bytes of a whole file."""
        end = 8 + struct.unpack("<Q", found[:8])[0]
        return cls(json.loads(found[8:end], object_pairs_hook=lambda pairs: Pairs(map(list, pairs))), found[end:])


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
    """Draw whole files, damaged in up to three places."""
    file = draw(whole_files())
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3, 0]))):
        draw(st.sampled_from(HARMS))(draw, file)
    found = bytearray(file.packed())
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
    """The places of the values in a tree: the list, and the index in it."""
    for index, each in enumerate(tree if isinstance(tree, list) else ()):
        if isinstance(tree, Pairs):
            yield each, 1
            yield from places(each[1])
        else:
            yield tree, index
            yield from places(each)


def drawn(draw: Any, found: Iterator[Any]) -> list[Any]:
    """Draw one of the entries; None if there are none."""
    some = list(found)
    return [draw(st.sampled_from(some))] if some else []


def a_value(draw: Any) -> Any:
    """Draw a copy of one of ``VALUES``, which later damage may change."""
    return copy.deepcopy(draw(st.sampled_from(VALUES)))


def shift_number(draw: Any, file: File) -> None:
    """Change a number, so that ranges overlap, leave holes, or are negative, or shapes do not fit."""
    numbers = ((holder, index) for holder, index in places(file.header) if type(holder[index]) is int)
    for holder, index in drawn(draw, numbers):
        holder[index] += draw(st.sampled_from([-64, -8, -1, 1, 8, 64]))


def shift_range(draw: Any, file: File) -> None:
    """Shift both ends equally, so that the size stays right."""
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
    """Repeat a key, with an equal or another value. Mostly a tensor's name, as the library refuses a field twice."""
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
    """Write the fields of an entry without keys, which the library accepts, too."""
    for pair in drawn(draw, iter(file.header)):
        if isinstance(pair[1], Pairs):
            pair[1] = [value for _, value in pair[1]]


def change_data(draw: Any, file: File) -> None:
    """Make the data shorter or longer than in the header."""
    by = draw(st.sampled_from([-9, -1, 1, 9]))
    file.data = file.data[:by] if by < 0 else file.data + bytes(by)


def change_length(draw: Any, file: File) -> None:
    """Change the length of the header in the first 8 bytes."""
    file.longer = draw(st.sampled_from([-8, -1, 1, 8, 100_000_001, 2**63, 2**64 - 1]))


def surround(draw: Any, file: File) -> None:
    kinds = st.sampled_from([b"", b" \n", b"\t", b"\0", b"\xef\xbb\xbf", b"\xff", b"{}", b"[", b","])
    file.before, file.after = draw(kinds), draw(kinds)


HARMS: list[Callable[[Any, File], None]] = [
    *(shift_number, shift_range, replace, remove, repeat, add, rename, write_as_array, change_data, change_length),
    surround,
]
