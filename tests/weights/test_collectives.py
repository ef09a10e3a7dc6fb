"""Windows in a message: each has its place, for any widths, also if they travel in two steps."""

import warnings

import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_bridge import ParallelDims
from mcore_bridge.weights.transfer import collectives
from mcore_bridge.weights.transfer.collectives import MODULUS, Group, lineup
from mcore_bridge.weights.transfer.copier import CopyTable
from mcore_bridge.weights.transfer.windows import Memory, Windows
from tests.support import pool


@st.composite
def meshes(draw):
    num_stages, num_places = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    widths = st.lists(st.sampled_from([8, 16, 24]), min_size=num_stages * num_places, max_size=num_stages * num_places)
    return num_stages, tuple(draw(widths))


@given(meshes())
def test_windows_fill_a_message_without_gaps(mesh):
    num_stages, widths = mesh
    found = lineup(widths, num_stages)
    ends = sorted((start, start + width) for start, width in zip(found.starts, widths, strict=True))
    assert [start for start, _ in ends] == [0, *(end for _, end in ends[:-1])]
    assert ends[-1][1] == sum(widths)
    if found.columns:
        num_places = len(widths) // num_stages
        by_column = [rank for place in range(num_places) for rank in range(place, len(widths), num_places)]
        assert sorted(range(len(widths)), key=found.starts.__getitem__) == by_column
        assert found.columns == tuple(sum(widths[place::num_places]) for place in range(num_places))
    else:
        assert found.starts == tuple(sorted(found.starts))
        assert num_stages == 1 or len(set(widths)) == 1


@given(meshes())
def test_rows_are_all_ranks_at_equal_distances(mesh):
    num_stages, widths = mesh
    found = lineup(widths, num_stages)
    seen = {}
    for first, length, distance in found.rows:
        seen |= {first + number: found.starts[first] + number * distance for number in range(length)}
    assert [seen[rank] for rank in range(len(widths))] == list(found.starts)


def travelled_quietly(all_widths):
    """``travelled``, where a warning is an error: torch warns of deprecated names."""
    with warnings.catch_warnings(action="error", category=FutureWarning):
        return travelled(all_widths)


def travelled(all_widths):
    """The content of the windows of each message, after all have been sent."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    collectives.FLAT, kept = 0, collectives.FLAT
    try:
        ParallelDims(tp=2, pp=2).initialize(device="cpu")
        group = Group.of_replica(ProcessGroupCollection.use_mpu_process_groups())
    finally:
        collectives.FLAT = kept
    assert group.num_stages == 2
    found = []
    for number, widths in enumerate(all_widths):
        lined_up = lineup(widths, group.num_stages)
        sent = (widths[group.rank],)
        memory = Memory(group, (sum(widths), 0), lambda size: torch.empty(size, dtype=torch.uint8))
        windows = Windows(group, memory, number, widths, sent, lined_up, CopyTable([]))
        windows.own.fill_(group.rank + 1)
        windows.send()
        windows.wait()
        places = zip(lined_up.starts, widths, strict=True)
        found.append([windows.all[start : start + width].unique().tolist() for start, width in places])
    return found


def balances(all_numbers):
    """Whether the numbers of both ranks balance, for each pair of numbers."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    ParallelDims(tp=2).initialize(device="cpu")
    group = Group.of_replica(ProcessGroupCollection.use_mpu_process_groups())
    return [group.sums_to_zero(numbers[group.rank]) for numbers in all_numbers]


def test_numbers_balance_if_their_sum_is_a_multiple_of_the_modulus():
    """Checksums of plans are far larger than the modulus."""
    balanced = [(0, 0), (5, -5), (7 << 60, -7 << 60), (MODULUS + 3, -3), (MODULUS // 2, 3 * MODULUS // 2)]
    others = [(0, 1), (5, -4), (7 << 60, 1 - (7 << 60)), (MODULUS // 2, MODULUS // 4), (MODULUS - 1, MODULUS)]
    assert pool.run(2, balances, balanced + others) == [[True] * len(balanced) + [False] * len(others)] * 2


def test_windows_of_any_width_travel_to_their_place():
    all_widths = [(8, 8, 8, 8), (64, 64, 8, 8), (8, 8, 64, 64), (64, 8, 8, 8), (8, 8, 8, 64), (8, 16, 24, 32)]
    for found in pool.run(4, travelled_quietly, all_widths):
        assert found == [[[1], [2], [3], [4]]] * len(all_widths)


def exchanged(sizes):
    """What each rank gets if each sends a text of its own size, in two rounds."""
    group = Group(None)
    return [group.all_gather_object("x" * of_round[group.rank]) for of_round in sizes]


def test_objects_of_any_size_arrive():
    small, large = collectives._SMALL // 2, collectives._SMALL * 3
    sizes = [(0, small), (large, 1), (small, large + 7)]
    assert pool.run(2, exchanged, sizes) == [[["x" * size for size in of_round] for of_round in sizes]] * 2
