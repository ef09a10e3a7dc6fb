"""Headers of files: we accept and refuse the same files as the ``safetensors`` library, and read equal bits.

The library, pinned in ``constraints/``, is the reference. A header is drawn whole and then damaged in up to three
places. One rule is ours alone: a repeated key is refused.
"""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from mcore_bridge.convert.convert import convert
from mcore_bridge.errors import CheckpointError
from mcore_bridge.weights.files.hf_folder import Checkpoint
from mcore_bridge.weights.files.safetensors import SafetensorsFile
from tests.support.damage import File, Pairs, Text, files
from tests.support.strategies import random_state, tiny

EXAMPLES = 10 * settings.default.max_examples


def told_by_library(path: Path) -> dict[str, Any] | None:
    """The tensors as the library reads them, or its error for one of them; None if it refuses the file."""
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
    """Whether a header that the library accepted has a repeated key."""

    def is_new(pairs: list[tuple[str, Any]]) -> None:
        twice.extend(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))

    twice: list[str] = []
    json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]], object_pairs_hook=is_new)
    return bool(twice)


def assert_refused(path: Path, target: Path) -> None:
    """Assert that an error names the file, and that ``convert`` raises before it makes anything."""
    for attempt in (lambda: SafetensorsFile(path), lambda: convert(path.parent, target, on_event=lambda *event: None)):
        with pytest.raises(CheckpointError, match=path.name):
            attempt()
    assert [each.name for each in target.parent.iterdir()] == ["hf"]


def compare(data: bytes, work: Path) -> str:
    """Compare our reader with the library, and return the outcome."""
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
    """A folder with an HF folder in it that has a config."""
    path = tmp_path_factory.mktemp("headers")
    HF.save_pretrained(path / "hf")
    return path


HF = tiny("llama", num_hidden_layers=1)


@settings(max_examples=EXAMPLES)
@given(files())
def test_any_header_is_taken_or_refused_as_by_the_library(work, data):
    event(compare(data, work))


def tensor(start: int, stop: int, shape: Any, **more: Any) -> Pairs:
    """An entry of bytes."""
    return Pairs([["dtype", "U8"], ["shape", shape], ["data_offsets", [start, stop]], *map(list, more.items())])


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (Pairs([["a", tensor(-8, -6, [2])]]), b""),
        (Pairs([["a", tensor(0, 2, [2])], ["b", tensor(1, 3, [2])]]), b"012"),
        (Pairs([["a", tensor(0, 1, [1])], ["b", tensor(2, 3, [1])]]), b"012"),
        (Pairs([["a", tensor(0, 2, [2])]]), b"012"),
        (Pairs([["a", tensor(0, 2, [2])]]), b"0"),
        (Pairs([["a", tensor(0, 2, [3])]]), b"01"),
        (Pairs([["a", tensor(0, 2, [2.0])]]), b"01"),
        (Pairs([["a", tensor(0, 2, [2, 2**63, 2])]]), b"01"),
        (Pairs([["a", tensor(0, 2, [2], more=Text("[" * 5000 + "]" * 5000))]]), b"01"),
        (Pairs([["a", tensor(0, 2, [2])], ["__metadata__", Pairs([["a", 1]])]]), b"01"),
        (Pairs([["a", tensor(0, 2, [2])], ["a", tensor(0, 2, [2])]]), b"01"),
        (Pairs([["a", tensor(0, 2, [2], more=Pairs([["k", 1], ["k", 2]]))]]), b"01"),
        (Pairs([["a", tensor(0, 2, [2])], ["__metadata__", Pairs([["a", "b"], ["a", "b"]])]]), b"01"),
        ([["a", 1]], b""),
        (3, b""),
    ],
)
def test_known_damage_is_refused(work, header, data):
    assert compare(File(header, data).packed(), work) in ("refused", "twice")


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
    path.write_bytes(file.packed())
    assert load_file(path).keys() == state.keys()
    convert(path.parent, work / "dist", on_event=lambda *event: None)
    convert(work / "dist", work / "back", on_event=lambda *event: None)
    for folder in (path.parent, work / "back"):
        found = Checkpoint(folder)
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
