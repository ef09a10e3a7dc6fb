"""``layout="balanced"`` against all possible layouts of small models, and at the sizes of the largest models."""

import time
from itertools import accumulate, combinations, combinations_with_replacement, pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mcore_bridge.config.mesh import balance
from mcore_bridge.config.mesh.balance import balanced
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.errors import MeshError
from tests.support.megatron_stages import FIRST, megatron_stages


def _rank_bytes(dims: ParallelDims, layers: list[int], embedding: int, loss: int) -> list[int]:
    held = [0] * dims.pp
    for stage in dims.stages(len(layers)):
        held[stage.pp_rank] += sum(layers[i] for i in stage.layers) + embedding * stage.embedding + loss * stage.loss
    return held


def _least(pp: int, vp: int, layers: list[int], embedding: int, loss: int) -> int:
    """The bytes of the fullest rank, over all layouts."""
    num, num_cuts, before = len(layers), pp * vp - 1, (0, *accumulate(layers))
    every = (
        combinations(range(1, num), num_cuts)
        if num > num_cuts
        else combinations_with_replacement(range(num + 1), num_cuts)
    )
    best = sum(layers) + embedding + loss
    for inner in every:
        held = [embedding, *[0] * (pp - 1)]
        held[-1] += loss
        for i, (start, end) in enumerate(pairwise((0, *inner, num))):
            held[i % pp] += before[end] - before[start]
        best = min(best, max(held))
    return best


SIZES = st.integers(0, 60)


@given(st.integers(2, 3), st.integers(1, 3), st.lists(st.integers(1, 40), min_size=1, max_size=10), SIZES, SIZES)
def test_balanced_is_the_best_of_all_layouts(pp: int, vp: int, layers: list[int], embedding: int, loss: int) -> None:
    dims = ParallelDims(pp=pp, vp=vp, tp=2, sp=True, layout="balanced")
    found = balanced(dims, layer_bytes=layers, embedding_bytes=embedding, loss_bytes=loss)
    assert (found.pp, found.vp, found.tp, found.sp) == (pp, vp, 2, True)
    assert max(_rank_bytes(found, layers, embedding, loss)) == _least(pp, vp, layers, embedding, loss)
    assert all(stage.layers for stage in found.stages(len(layers))) == (len(layers) >= pp * vp)
    assert megatron_stages({"pp": pp, "vp": vp, "layout": found.layout}, len(layers)) == found.stages(len(layers))


@given(st.integers(2, 4), st.integers(1, 3), st.integers(1, 12), st.integers(1, 40), SIZES, SIZES, st.data())
def test_the_descent_alone_is_best_for_one_chunk_per_rank_and_for_equal_layers(
    pp: int, vp: int, num: int, size: int, embedding: int, loss: int, data: Any
) -> None:
    assume(num < 10 or pp * vp < 9)
    layers = [size] * num if vp > 1 else data.draw(st.lists(st.integers(1, 40), min_size=num, max_size=num))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balance, "_FEW", 0)
        found = balanced(ParallelDims(pp=pp, vp=vp), layer_bytes=layers, embedding_bytes=embedding, loss_bytes=loss)
    assert max(_rank_bytes(found, layers, embedding, loss)) == _least(pp, vp, layers, embedding, loss)


@given(st.integers(2, 3), st.lists(st.integers(1, 40), min_size=6, max_size=11), SIZES, SIZES)
def test_the_descent_is_within_one_layer_of_the_best_in_general(
    pp: int, layers: list[int], embedding: int, loss: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balance, "_FEW", 0)
        found = balanced(ParallelDims(pp=pp, vp=2), layer_bytes=layers, embedding_bytes=embedding, loss_bytes=loss)
    fullest = max(_rank_bytes(found, layers, embedding, loss))
    assert fullest <= _least(pp, 2, layers, embedding, loss) + max(layers)


@pytest.mark.parametrize(("pp", "vp", "num_layers"), [(16, 2, 61), (16, 1, 61), (8, 4, 94), (16, 4, 128)])
def test_balanced_is_fast_and_near_the_mean_for_the_largest_models(pp: int, vp: int, num_layers: int) -> None:
    layers = [150, 150, 150, *[1_000 + i % 3 for i in range(num_layers - 3)]]
    dims = ParallelDims(pp=pp, vp=vp, layout="balanced")
    start = time.process_time()
    found = balanced(dims, layer_bytes=layers, embedding_bytes=160, loss_bytes=160)
    assert time.process_time() - start < 1.0
    held = _rank_bytes(found, layers, 160, 160)
    assert max(held) <= sum(held) / pp + 1_002
    assert found.stages(num_layers)[0].embedding


def test_balanced_gives_the_ranks_with_embedding_and_loss_fewer_layers() -> None:
    found = balanced(ParallelDims(pp=4, layout="balanced"), layer_bytes=[10] * 14, embedding_bytes=10, loss_bytes=10)
    assert found.layout == "Ettt|tttt|tttt|tttL"
    assert balanced(ParallelDims(layout="balanced"), layer_bytes=[1], embedding_bytes=1, loss_bytes=1) == ParallelDims()


@pytest.mark.parametrize(
    ("fields", "layers", "message"),
    [
        ({"pp": 2, "layout": "Et|tL"}, [1, 1], r'layout must be "balanced" or None.*found \'Et\|tL\''),
        ({"pp": 2, FIRST: 1}, [1, 1], r"layout already says where every layer goes"),
        ({"pp": 2}, [], r"at least one layer"),
        ({"pp": 2}, [1, -1], r"no negative bytes, found layer_bytes=\[1, -1\]"),
    ],
)
def test_balanced_refuses_what_is_decided_or_senseless(fields: dict[str, Any], layers: list[int], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        balanced(ParallelDims(**fields), layer_bytes=layers, embedding_bytes=0, loss_bytes=0)


def test_an_unresolved_layout_never_reaches_a_config() -> None:
    with pytest.raises(MeshError, match=r"must become an explicit layout first: call balanced"):
        ParallelDims(pp=2, layout="balanced").to_config_fields()
