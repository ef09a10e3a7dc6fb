"""Copies of bytes: what a plan copies, on the CPU and by the kernel, against indexing."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_bridge.weights.transfer.byte_copy import ByteCopy
from mcore_bridge.weights.transfer.copier import Buffers, CopyTable

SIZE = 1 << 16  # bytes of a buffer


@st.composite
def tables(draw):
    """Moves whose targets do not overlap: each has a stretch of its target to itself."""
    moves, start = [], 0
    for _ in range(draw(st.integers(1, 6))):
        item = draw(st.sampled_from([1, 2, 4, 8]))
        rows, cols = draw(st.integers(1, 40)), draw(st.sampled_from([1, 3, 8, 64, 100]))
        unit = draw(st.sampled_from([item, 16, 256]))  # everything a multiple of this, or nearly
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


def check(moves, device):
    random = np.random.default_rng(0)
    sources = [random.integers(0, 256, SIZE, dtype=np.uint8) for _ in range(2)]
    target = torch.zeros(SIZE + 256, dtype=torch.uint8, device=device)[256:]  # inside of a larger storage
    table = CopyTable(moves)
    for shift in (0, 8, 0):  # of where the sources begin: not always where the widest words can
        near = torch.zeros(2, SIZE + 256, dtype=torch.uint8, device=device)[:, shift : SIZE + shift]
        near.copy_(torch.from_numpy(np.stack(sources)))
        target.zero_()
        table.run(Buffers(list(near)), Buffers([target]), torch.device(device))
        assert (target.cpu().numpy() == expected(moves, sources)).all()


@settings(max_examples=100, deadline=None)
@given(tables())
def test_moves_are_made_as_they_say(moves):
    check(moves, "cpu")


def test_only_moves_in_order_are_dense():
    move = ByteCopy(0, 64, 2, 0, 4, 8, 2, 16, 2, 16, 2)
    assert move.is_dense()
    assert move.num_bytes() == 64
    assert not move._replace(source_row=32).is_dense()
    assert not move._replace(target_row=32).is_dense()
    assert not move._replace(target_row=2, target_col=8).is_dense()  # a transpose, which writes the same bytes
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
