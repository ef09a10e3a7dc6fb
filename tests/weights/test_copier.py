"""The copies of a plan, on the CPU and by the kernel, compared with indexing."""

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_bridge.weights.plan.boxes import ByteCopy
from mcore_bridge.weights.transfer.copier import Buffers, CopyTable

PACKAGE = Path(__file__).parent.parent.parent / "mcore_bridge"
SIZE = 1 << 16  # bytes of a buffer


@st.composite
def tables(draw):
    """Moves whose targets do not overlap: each has a separate range of its target."""
    moves, start = [], 0
    for _ in range(draw(st.integers(1, 6))):
        item = draw(st.sampled_from([1, 2, 4, 8]))
        rows, cols = draw(st.integers(1, 40)), draw(st.sampled_from([1, 3, 8, 64, 100]))
        unit = draw(st.sampled_from([item, 16, 256]))  # all numbers are multiples of this, or nearly
        run = -(-cols * item // unit) * unit
        turned = draw(st.booleans())  # columns and rows exchanged in the source
        near = (item, -(-rows * item // unit) * unit) if turned else (run + unit * draw(st.integers(0, 2)), item)
        far = run + unit * draw(st.integers(0, 2))
        begin = -(-start // unit) * unit
        if begin + rows * far > SIZE or rows * near[0] + cols * near[1] > SIZE // 2:
            break
        offset = draw(st.integers(0, 64)) * unit
        moves.append(ByteCopy(draw(st.integers(0, 1)), offset, 2, begin, rows, cols, item, *near, far, item))
        start = begin + rows * far
    return moves


def expected(moves, sources):
    target = np.zeros(SIZE, dtype=np.uint8)
    for move in moves:
        for row in range(move.rows):
            for col in range(move.cols):
                near = move.source_start + row * move.source_row + col * move.source_col
                far = move.target_start + row * move.target_row + col * move.target_col
                target[far : far + move.item] = sources[move.source][near : near + move.item]
    return target


def check(moves, device, *, target_device=None, runs_on=None):
    """The devices of sources and of the target may differ, and a kernel may run on either."""
    random = np.random.default_rng(0)
    sources = [random.integers(0, 256, SIZE, dtype=np.uint8) for _ in range(2)]
    target = torch.zeros(SIZE + 256, dtype=torch.uint8, device=target_device or device)[256:]  # in a larger storage
    table = CopyTable(moves)
    for shift in (0, 8, 0):  # the beginning of the sources, which may not be aligned to the widest words
        near = torch.zeros(2, SIZE + 256, dtype=torch.uint8, device=device)[:, shift : SIZE + shift]
        near.copy_(torch.from_numpy(np.stack(sources)))
        for where in runs_on or (device,):
            target.zero_()
            table.run(Buffers(list(near)), Buffers([target]), torch.device(where))
            assert (target.cpu().numpy() == expected(moves, sources)).all()


@settings(max_examples=100, deadline=None)
@given(tables())
def test_moves_are_made_as_they_say(moves):
    check(moves, "cpu")


def test_the_gpus_of_buffers_are_what_the_caller_knows_or_those_of_the_tensors():
    tensors = [torch.empty(1)]
    assert Buffers(tensors).gpus == frozenset()
    assert Buffers(tensors, frozenset({1})).gpus == {1}


def test_buffers_are_aligned_if_each_begins_where_the_widest_words_can():
    whole = torch.empty(64, dtype=torch.uint8)
    assert Buffers([whole, whole[16:]]).is_aligned
    assert not Buffers([whole, whole[8:]]).is_aligned


def test_only_moves_in_order_are_dense():
    move = ByteCopy(0, 64, 2, 0, 4, 8, 2, 16, 2, 16, 2)
    assert move.is_dense()
    assert move.num_bytes() == 64
    assert not move._replace(source_row=32).is_dense()
    assert not move._replace(target_row=32).is_dense()
    assert not move._replace(target_row=2, target_col=8).is_dense()  # a transpose, which writes an equal range of bytes
    assert move._replace(rows=1, source_row=32).is_dense()


@pytest.mark.multigpu
def test_the_kernel_makes_the_same_moves():
    @settings(max_examples=300, deadline=None)
    @given(tables())
    def everywhere(moves):
        check(moves, "cuda")

    everywhere()
    long = [
        ByteCopy(0, 0, 2, 0, 1, 50_000, 1, 50_000, 1, 50_000, 1),
        ByteCopy(1, 16, 2, 50_000, 1, 500, 2, 1000, 2, 1000, 2),
    ]
    check(long, "cuda")
    check(
        [ByteCopy(0, 0, 2, 0, 130, 96, 2, 256, 2, 384, 2), ByteCopy(1, 16, 2, 50_000, 129, 24, 2, 48, 2, 96, 2)], "cuda"
    )
    check([move._replace(target_start=move.target_start + 8) for move in long], "cuda")


@pytest.mark.multigpu
def test_a_kernel_reaches_another_gpu_whichever_is_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    gpus = ["cuda:0", "cuda:1"]

    @settings(max_examples=50, deadline=None)
    @given(tables(), st.permutations(gpus), st.integers(0, 1))
    def everywhere(moves, devices, current):
        with torch.cuda.device(current):
            check(moves, devices[0], target_device=devices[1], runs_on=gpus)

    everywhere()


WITH_A_DEVICE = {"Stream", "current_stream", "default_stream", "synchronize", "record"}
"""Functions of ``torch.cuda``, and a method of its events, that use the current device by default."""


def test_no_launch_event_or_stream_leaves_its_device_open():
    """A process may have tensors on a GPU that is not its current one."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "cpu.py":  # it defines these names for machines without a GPU
            continue
        tree = ast.parse(path.read_text())
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name, _, attribute = ast.unparse(call.func).rpartition(".")
            if attribute in WITH_A_DEVICE and (name == "torch.cuda" or attribute == "record"):
                assert call.args, f"{path}:{call.lineno} names no device or stream"


def test_each_kernel_is_launched_at_one_place_which_makes_its_device_the_current_one():
    texts = {path.name: path.read_text() for path in PACKAGE.rglob("*.py")}
    kernels = {"triton_copy.py": ("copier.py", "launch("), "triton_encode.py": ("encode_tables.py", "encode_tiles(")}
    assert {name for name, text in texts.items() if "triton.jit(" in text} == kernels.keys()
    for kernel, (place, call) in kernels.items():
        function = "FLOATS, encode" if kernel == "triton_encode.py" else "launch"
        imports = f"{kernel.removesuffix('.py')} import {function}"
        assert [name for name, text in texts.items() if imports in text] == [place]
        (block,) = (
            node
            for node in ast.walk(ast.parse(texts[place]))
            if isinstance(node, ast.With) and call in ast.unparse(node)
        )
        assert ast.unparse(block.items[0]) == "torch.cuda.device(device)"
