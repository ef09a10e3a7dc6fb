"""Files of the safetensors format: slices read by position equal the written values, and other libraries read our
files.
"""

import contextlib
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import _SIZE, load_file, save_file

from mcore_bridge.errors import CheckpointError
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.files import positional_io
from mcore_bridge.weights.files.positional_io import _is_dense
from mcore_bridge.weights.files.safetensors import DTYPES, SafetensorsFile, SafetensorsWriter, array_of
from mcore_bridge.weights.files.slice_reader import FileCopy, _batches


@st.composite
def slices(draw):
    """A shape, and a slice of it in some order of its dims."""
    shape = draw(st.lists(st.integers(1, 9), min_size=0, max_size=4))
    index = tuple(
        slice(start, draw(st.integers(start + 1, size)), draw(st.integers(1, 3)))
        for size in shape
        for start in [draw(st.integers(0, size - 1))]
    )
    return shape, index, draw(st.permutations(range(len(shape))))


@given(
    slices(),
    st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64]),
    st.integers(1, 7) | st.integers(8, 300),  # also less than an element
)
def test_pieces_of_any_slice_are_read_from_any_place(tmp_path_factory, drawn, dtype, num_bytes):
    shape, index, order = drawn
    path = tmp_path_factory.mktemp("slices") / "model.safetensors"
    whole = torch.randint(0, 100, shape).to(dtype)
    save_file({"before": torch.ones(3, dtype=dtype), "whole": whole}, path)
    file = SafetensorsFile(path)
    expected, view = (tensor[index].permute(order) for tensor in (whole, file.tensor("whole")))
    found = torch.zeros_like(expected)
    with small_blocks(50):
        for piece in FileCopy(view, found, dtype).pieces(num_bytes):
            arrived = torch.zeros(piece.source.shape, dtype=dtype)
            assert arrived.nbytes <= max(num_bytes, dtype.itemsize)
            file.read([piece.source], array_of(arrived))
            piece.target.add_(arrived)  # a value that came twice would be doubled
    assert torch.equal(found, expected)


@given(st.data())
def test_views_of_one_file_are_read_together(tmp_path_factory, data):
    """Views are in any order, with gaps or without, some twice, some empty. Reads go on from the view before."""
    path = tmp_path_factory.mktemp("views") / "model.safetensors"
    shapes = data.draw(st.lists(st.sampled_from([(), (0, 3), (1,), (4, 3), (2, 3, 2)]), min_size=1, max_size=6))
    numbers = iter(range(1000))
    tensors = {
        str(number): torch.tensor([float(next(numbers)) for _ in range(math.prod(shape))]).view(shape)
        for number, shape in enumerate(shapes)
    }
    save_file(tensors, path)
    file = SafetensorsFile(path)
    chosen = data.draw(st.lists(st.tuples(st.sampled_from(sorted(tensors)), st.booleans()), max_size=8))
    expected, views = (
        [of(name)[..., ::2] if cut and tensors[name].dim() else of(name) for name, cut in chosen]
        for of in (tensors.__getitem__, file.tensor)
    )
    out = torch.full((sum(view.numel() for view in views),), -1.0)
    file.read(views, array_of(out))
    assert out.tolist() == [value for tensor in expected for value in tensor.flatten().tolist()]


def test_what_lies_side_by_side_is_read_at_once(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    save_file({name: torch.full((4, 3), float(index)) for index, name in enumerate("abcd")}, path)
    file, reads = SafetensorsFile(path), []
    monkeypatch.setattr(os, "preadv", lambda *arguments, read=os.preadv: reads.append(arguments) or read(*arguments))
    out = torch.empty(30)
    file.read([file.tensor("d")[2:], file.tensor("c")[:2], file.tensor("b"), file.tensor("a")[2:]], array_of(out))
    assert len(reads) == 2
    assert out.tolist() == [3.0] * 6 + [2.0] * 6 + [1.0] * 12 + [0.0] * 6


@pytest.mark.parametrize("most", [3, 8, 1 << 20])
def test_what_a_call_reads_in_part_is_read_whole(tmp_path, monkeypatch, most):
    preadv, data = os.preadv, os.urandom(8000)
    (tmp_path / "file").write_bytes(data)
    monkeypatch.setattr(
        os, "preadv", lambda fd, left, offset: preadv(fd, [left[0][:most], *left[1 : most // 4]], offset)
    )
    out = np.zeros(6000, np.uint8)
    parts = [
        (offset, out.data[2 * offset : 2 * offset + 2]) for offset in range(0, 2998, 2)
    ]  # more than one call reads
    with (tmp_path / "file").open("rb") as file:
        positional_io.read_scattered(file.fileno(), [*parts[::-1], (7995, out.data[5995:])])
        with pytest.raises(EOFError, match="ends 3 bytes before byte 8003"):
            positional_io.read_scattered(file.fileno(), [(7990, bytearray(13))])
    assert all(out[2 * offset : 2 * offset + 2].tobytes() == data[offset : offset + 2] for offset, _ in parts)
    assert out[5995:].tobytes() == data[7995:]


@contextlib.contextmanager
def small_blocks(num_bytes):
    before, positional_io.BLOCK_BYTES = positional_io.BLOCK_BYTES, num_bytes
    yield
    positional_io.BLOCK_BYTES = before


@pytest.mark.parametrize("index", [np.s_[:], np.s_[:, 3:5], np.s_[::2]])
def test_a_file_that_became_shorter_is_an_error_and_no_signal(tmp_path, index):
    path = tmp_path / "model.safetensors"
    save_file({"whole": torch.ones(3000, 10)}, path)
    file = SafetensorsFile(path)
    view = file.tensor("whole")[index]
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors: the file ends .* copy it again"):
        file.read([view], array_of(torch.empty(view.shape)))
    with pytest.raises(CheckpointError, match=r"model\.safetensors has \d+ bytes, and had .* copy it again"):
        file.tensor("whole")


def test_what_is_put_into_place_at_once_is_of_one_dtype_on_either_side(tmp_path):
    """Kernels that copy many tensors at once have used the dtype of the first tensor for all tensors."""
    path = tmp_path / "model.safetensors"
    save_file({"narrow": torch.ones(6, dtype=torch.bfloat16), "wide": torch.ones(6)}, path)
    file = SafetensorsFile(path)
    views = [file.tensor(name) for name in ("narrow", "narrow", "wide", "narrow")]
    dtypes = torch.bfloat16, torch.float32, torch.float32, torch.bfloat16
    targets = [
        torch.empty(12, dtype=dtype)[::2] for dtype in dtypes
    ]  # with gaps, so that no read writes there directly
    slices = [FileCopy(view, target, view.dtype, (file,)) for view, target in zip(views, targets, strict=True)]
    found = list(_batches([*slices, *slices[3:]], num_bytes=1 << 10))
    assert [len(pieces) for _, pieces in found] == [1, 1, 1, 2]


def example():
    """A tensor of each dtype, dtypes of one byte first, and shapes without a dim and without an element."""
    dtypes = sorted(DTYPES.values(), key=lambda dtype: dtype.itemsize)
    tensors = {f"of {dtype}": (torch.arange(6 * dtype.itemsize).byte() % 2).view(dtype) for dtype in dtypes}
    return {**tensors, "scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), 'a "name"': torch.ones(2, 3)}


def test_what_a_call_writes_in_part_is_written_whole(tmp_path, monkeypatch):
    pwrite, data = os.pwrite, np.arange(100, dtype=np.int16)
    monkeypatch.setattr(os, "pwrite", lambda fd, left, offset: pwrite(fd, left[:7], offset))
    with (tmp_path / "file").open("wb") as file:
        positional_io.write_bytes(file.fileno(), 5, data)
    assert (tmp_path / "file").read_bytes() == bytes(5) + data.tobytes()


def test_others_read_what_we_write(tmp_path):
    """All dtypes that the library writes. Tensors come in another order than in the file, and in pieces."""
    assert set(DTYPES.values()) == {dtype for dtype in _SIZE if dtype is not None}
    path = tmp_path / "model.safetensors"
    tensors = example()
    described = [TensorSpec.of(name, tensor) for name, tensor in tensors.items()]
    with SafetensorsWriter(path, described) as writer:
        for name, tensor in reversed(tensors.items()):
            flat = tensor.flatten().view(torch.uint8)
            for start in range(0, flat.nbytes, 5):
                writer.write(name, start, flat[start : start + 5])
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].flatten().view(torch.uint8).equal(tensor.flatten().view(torch.uint8))
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_what_the_format_lacks_is_not_written(tmp_path):
    with pytest.raises(CheckpointError, match=r"a is torch\.complex128 of shape \(2,\), which safetensors lacks"):
        SafetensorsWriter(tmp_path / "model.safetensors", [TensorSpec("a", (2,), torch.complex128)])
    assert not list(tmp_path.iterdir())


def test_headers_and_tensors_are_aligned_and_in_order(tmp_path):
    path = tmp_path / "model.safetensors"
    described = [TensorSpec.of(name, tensor) for name, tensor in example().items()]
    with SafetensorsWriter(path, described):
        pass
    os.truncate(path, path.stat().st_size + sum(tensor.nbytes for tensor in example().values()))
    entries = list(SafetensorsFile(path).entries.values())
    assert entries[0].start % 8 == 0
    assert all(entry.start % DTYPES[entry.dtype].itemsize == 0 for entry in entries)
    assert [entry.start for entry in entries[1:]] == [entry.stop for entry in entries[:-1]]


def test_pieces_come_in_the_order_of_their_source():
    """A file is read from beginning to end, even if the target has the dims in another order."""
    source, target = torch.arange(48).view(6, 8), torch.empty(8, 6, dtype=torch.int64)
    for one, other in ((source, target.t()), (source.t(), target)):
        offsets = [piece.source.storage_offset() for piece in FileCopy(one, other, torch.int64).pieces(8 * 8)]
        assert offsets == [0, 8, 16, 24, 32, 40]


def test_rows_without_gaps_are_read_at_once():
    for shape, strides, is_dense in (
        ((2, 3), (12, 4), True),
        ((1, 3), (99, 4), True),
        ((2, 3), (16, 4), False),
        ((3, 2), (4, 12), False),
    ):
        assert _is_dense(shape, strides, 4) == is_dense
