"""The laws of layouts, and of their traces, over all sizes of axes."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_bridge.errors import MappingError
from mcore_bridge.rules import trace as rules_trace
from mcore_bridge.rules.layout import (
    COLUMN,
    GATED_UP,
    INTERLEAVED,
    QKV,
    REPLICATED,
    ROW,
    TRANSPOSED,
    VOCAB,
    Concat,
    Fill,
    Rearrange,
    Replicate,
    Resize,
    Within,
)
from mcore_bridge.rules.mapping import Binding
from mcore_bridge.rules.mixer_layouts import HALVES_OF_KEYS, HALVES_OF_QUERIES
from mcore_bridge.rules.trace import _runs, line_starts, moved_dim, trace
from mcore_bridge.weights.plan import positions
from mcore_bridge.weights.plan.positions import ShardPositions

NAMED = {
    "COLUMN": COLUMN,
    "ROW": ROW,
    "REPLICATED": REPLICATED,
    "VOCAB": VOCAB,
    "GATED_UP": GATED_UP,
    "QKV": QKV,
    "HALVES_OF_QUERIES": HALVES_OF_QUERIES,
    "HALVES_OF_KEYS": HALVES_OF_KEYS,
}
PADDED = Resize("vocab", "padded_vocab")
PRIMITIVES = [
    Rearrange("(tp n) ...", "tp n ..."),
    Concat(1, (1, "groups")),
    Replicate(),
    Fill((("groups", 1), (1,)), (1,)),
    Within(0, (1, "groups"), 1, Rearrange("(gate_up n) ...", "(n gate_up) ...")),
    PADDED,
]


@st.composite
def problems(draw):
    """A named layout, sizes of axes, and HF parts of distinct integers that fit them."""
    name = draw(st.sampled_from(sorted(NAMED)))
    tp = draw(st.sampled_from([1, 2, 3, 4, 8]))
    groups = draw(st.sampled_from([1, 2, 3, 4, 8]))
    heads_per_group = draw(st.integers(1, 4))
    head_dim = tp * draw(st.integers(1, 3))  # rows that tp divides, for any groups
    vocab = draw(st.integers(1, 40))
    padded = (-(-vocab // tp) + draw(st.integers(0, 2))) * tp
    axes = {"tp": tp, "groups": groups, "heads_per_group": heads_per_group, "vocab": vocab, "padded_vocab": padded}
    width = draw(st.integers(1, 3))
    plain, rotated = draw(st.integers(1, 3)), 2 * draw(st.integers(1, 3))
    axes |= {"plain": plain, "rotated": rotated, "latent": width, "halves": 2}
    rows = {
        "HALVES_OF_QUERIES": [tp * groups * (plain + rotated)],
        "HALVES_OF_KEYS": [width + rotated],
        "QKV": [groups * heads_per_group * head_dim, groups * head_dim, groups * head_dim],
        "GATED_UP": [tp * width, tp * width],
        "VOCAB": [vocab],
    }.get(name, [tp * width])
    if name == "HALVES_OF_QUERIES":
        axes["groups"] *= tp  # each head is on one rank
    columns = tp * draw(st.integers(1, 3))
    trailing = (columns,) if name == "ROW" or draw(st.booleans()) else ()
    start, parts = 1, []
    for length in rows:
        size = length * (columns if trailing else 1)
        parts.append(torch.arange(start, start + size).view(length, *trailing))
        start += size
    return NAMED[name], axes, tuple(parts)


def equal(left, right):
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@given(problems())
def test_round_trip_from_hf_is_exact(problem):
    layout, axes, parts = problem
    (shards,) = layout(parts, axes)
    assert shards.shape[0] == axes["tp"]
    assert equal((~layout)((shards,), axes), parts)


@given(problems())
def test_round_trip_from_mcore_is_exact_for_true_shards(problem):
    layout, axes, parts = problem
    shards = layout(parts, axes)
    assert equal(layout((~layout)(shards, axes), axes), shards)


@pytest.mark.parametrize("name", sorted(NAMED))
def test_inverse_of_the_inverse_is_the_layout(name):
    assert ~~NAMED[name] == NAMED[name]


@pytest.mark.parametrize("f", PRIMITIVES)
@pytest.mark.parametrize("g", PRIMITIVES)
def test_inverse_of_a_chain_is_the_chain_of_inverses_reversed(f, g):
    assert ~(f >> g) == ~g >> ~f
    assert (f >> g) >> f == f >> (g >> f)


@given(problems())
def test_trace_does_what_the_layout_does(problem):
    layout, axes, parts = problem
    (shards,) = layout(parts, axes)
    traced = trace(layout, shards.shape[1:], axes)
    assert traced.part_shapes == tuple(tuple(part.shape) for part in parts)
    written = torch.full_like(shards, -1)
    for copy in traced.to_mcore:
        copy.of_shard(written[copy.shard]).copy_(copy.of_part(parts[copy.part]))
    for shard in range(axes["tp"]):
        for dim, start, size in traced.padding(shard):
            assert (written[shard].narrow(dim, start, size) == -1).all(), "padding overlaps a copy"
            written[shard].narrow(dim, start, size).zero_()
    assert torch.equal(written, shards)


@given(problems())
def test_trace_writes_every_hf_element_exactly_once(problem):
    layout, axes, parts = problem
    (shards,) = layout(parts, axes)
    traced = trace(layout, shards.shape[1:], axes)
    back, times = [torch.zeros_like(p) for p in parts], [torch.zeros_like(p) for p in parts]
    for copy in traced.to_hf:
        copy.of_part(back[copy.part]).copy_(copy.of_shard(shards[copy.shard]))
        copy.of_part(times[copy.part]).add_(1)
    assert equal(back, parts)
    assert all((count == 1).all() for count in times)


@given(problems())
def test_positions_of_a_shard_say_where_each_element_is(problem):
    check_positions(*problem)


def check_positions(layout, axes, parts):
    (shards,) = layout(parts, axes)
    traced = trace(layout, shards.shape[1:], axes)
    names = tuple(f"{number}[2]" for number in range(len(parts)))  # the third entry of a stack of four
    binding = Binding("", names, layout, True, "tp", ("second",))
    times = [torch.zeros(4 * part.numel()) for part in parts] + [torch.zeros(parts[0].numel())]
    every = torch.arange(shards[0].numel()).flip(0)
    for number, shard in enumerate(shards):
        places = ShardPositions.of(binding, traced, number, torch.int64, 4)
        assert [spec.shape for spec in places.hf] == [(4, *part.shape) for part in parts] + [parts[0].shape]
        for slot, chosen, at in places.of_elements(every):
            times[slot][at] += 1
            part = parts[slot % len(parts)].flatten()
            start = 2 * len(part) if slot < len(parts) else 0
            assert equal([shard.flatten()[every[chosen]]], [part[at - start]])
    for part, count in zip([*parts, parts[0]], times, strict=True):
        assert equal([count.nonzero().flatten() % part.numel()], [torch.arange(part.numel())]), "an element is absent"
        assert count.sum() == part.numel(), "an element comes twice"


def slipped(**slip):
    """A mistake in the numbers of each copy."""
    right = ShardPositions._of_copy
    wrong = lambda self, copy, flat: right(self, replace(copy, **slip), flat)  # noqa: E731
    return mock.patch.object(ShardPositions, "_of_copy", wrong)


MISTAKES = {
    "view": mock.patch.object(positions, "_strides_in_shard", lambda copy, shape: positions._strides(shape)),
    "step": slipped(part_step=1),
    "start": slipped(part_start=0),
    "shard": slipped(shard_start=0),
}


@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_positions_in_a_turned_tensor_with_steps(mistake):
    """Gate and up are alternate columns of one tensor, for two ranks."""
    problem = TRANSPOSED >> INTERLEAVED, {"tp": 2, "gate_up": 2}, (torch.arange(1, 41).view(5, 8),)
    if mistake is None:
        return check_positions(*problem)
    with MISTAKES[mistake], pytest.raises((AssertionError, IndexError)):
        check_positions(*problem)


def test_runs_do_not_end_where_a_piece_of_a_long_line_ends(monkeypatch):
    line = torch.tensor([2, 3, 4, 5, 9, 10, 0, 0, 20, 21, 22, 7, 8, 0])
    for size in range(1, len(line) + 1):
        monkeypatch.setattr(rules_trace, "_PIECE", size)
        assert [*_runs(line)] == [(0, 2, 4), (4, 9, 2), (8, 20, 3), (11, 7, 2)]


def test_a_trace_is_short():
    """Copies are whole slices: 32768 rows at tp 8 take one copy a head and shard, not one a row."""
    axes = {"tp": 8, "groups": 8, "heads_per_group": 4, "vocab": 151936, "padded_vocab": 151936}
    assert len(trace(QKV, (6 * 128, 64), axes).to_mcore) == 24
    assert len(trace(VOCAB, (151936 // 8, 64), axes).to_hf) == 8


@pytest.mark.parametrize(
    ("layout", "shape"),
    [(QKV, (7, 3)), (GATED_UP, (5, 2)), (VOCAB, (7, 2)), (ROW, (4,))],
    ids=["QKV", "GATED_UP", "VOCAB", "ROW"],
)
def test_a_shape_that_does_not_fit_raises_with_shape_and_axes(layout, shape):
    axes = {"tp": 2, "groups": 2, "heads_per_group": 2, "vocab": 13, "padded_vocab": 16}
    with pytest.raises(MappingError, match=str(shape[0])):
        trace(layout, shape, axes)


def test_a_layout_that_loses_elements_is_refused():
    """A vocabulary that is longer than its padded size."""
    with pytest.raises(MappingError, match="does not give back every element of its part 0 exactly once"):
        trace(VOCAB, (4, 2), {"tp": 2, "vocab": 10, "padded_vocab": 8})


def test_a_layout_moves_elements_along_one_dim():
    with pytest.raises(MappingError, match=r"moves elements along dims \[0, 1\]; express it as a layout along one dim"):
        moved_dim(COLUMN >> Rearrange("tp n (g m)", "tp n g m"))


def test_layouts_do_no_arithmetic():
    """Bits are kept: NaN payloads, infinities, negative zero and subnormals come back unchanged."""
    bits = torch.tensor([0x7FC1, 0xFFFF, 0x8000, 0x0001, 0x7F80, 0xFF80, 0x3F81, 0x0080], dtype=torch.int32)
    part = bits.to(torch.int16).view(torch.bfloat16).repeat(6, 4)
    axes = {"tp": 2, "groups": 1, "heads_per_group": 4, "vocab": 6, "padded_vocab": 8}
    for layout, parts in ((QKV, (part[:4], part[:1], part[:1])), (GATED_UP, (part, part)), (ROW, (part,))):
        back = (~layout)(layout(parts, axes), axes)
        assert equal([b.view(torch.int16) for b in back], [p.view(torch.int16) for p in parts])


def test_padding_next_to_elements_is_told_from_them():
    """Padding before the first element of a line does not hide the line. None of our layouts has such padding."""
    assert list(_runs(torch.tensor([0, 2, 3, 4, 0, 0, 7]))) == [(1, 2, 3), (6, 7, 1)]
    assert min(line_starts([4, 4])) > 1, "padding is 0, and 0, 1 would be a run"


def test_a_vocabulary_of_another_size_is_refused():
    for layout, rows in ((PADDED, 5), (~PADDED, 4)):
        with pytest.raises(MappingError, match=rf"dim 0 of shape \({rows},\) must be the axis \w*vocab = (4|8)"):
            layout((torch.ones(rows),), {"vocab": 4, "padded_vocab": 8})
