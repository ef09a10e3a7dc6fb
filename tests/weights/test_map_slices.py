"""Engine maps as targets: an engine's rank gets the slices that its map copies, from any mesh, and nothing else."""

import pytest
import torch

import mcore_bridge as mb
from mcore_bridge import EngineRank, ParallelDims
from mcore_bridge.errors import TargetError, TransferError
from mcore_bridge.weights.engine.engine_tensors import EngineMemory
from mcore_bridge.weights.plan.boxes import BoxCopy, Dim
from mcore_bridge.weights.plan.map_slices import MapSlices, _read
from tests.support import fake_mesh
from tests.support.strategies import random_state
from tests.support.target_models import ENGINES, FAMILIES, Slices, assert_gets, expected, held_by, ranks_of, specs_of

MESHES = {
    "sized": ParallelDims(tp=2, pp=2, ep=2, sp=True),
    "sparse": ParallelDims(tp=2, pp=2, ep=2, sp=True),
    "stacked": ParallelDims(tp=2, ep=2, sp=True),
    "latent": ParallelDims(tp=4, ep=2, sp=True),
    "linear": ParallelDims(tp=2, ep=2, sp=True),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_map_gets_the_slices_that_its_engine_uses(family):
    hf = FAMILIES[family]
    state = random_state(hf)
    held = held_by(hf, MESHES.get(family, ParallelDims(tp=2, pp=3, sp=True)), state)
    for name in ("TP4", "TP2 PP2") if family in ("tied", "fused") else ("TP4 EP2", "EP3"):
        ranks = ranks_of(ENGINES[name])[: len(held)]
        engines = [Slices(hf, state, rank) for rank in ranks]
        mapped = [mb.map_engine(specs_of(state), lambda e=e: e.tensors, e.load, engine=name) for e in engines]
        nothing = ["nothing"] * (len(held) - len(ranks))
        states, _ = fake_mesh.export_to(held, [*(engine.map for engine in mapped), *nothing])
        for engine, known, arrived in zip(engines, mapped, states[: len(engines)], strict=True):
            used = {name: t for name, t in expected(hf, state, engine.target).items() if t.numel()}
            assert_gets(arrived, used)
            for tensor in engine.tensors.values():
                tensor.fill_(torch.nan)
            narrow = MapSlices(known.map).narrowed(specs_of(arrived))
            assert narrow.problems() == []
            memory = EngineMemory(narrow, lambda e=engine: e.tensors)
            memory.find()
            assert list(memory.copy(arrived.items())) == []
            assert_equal(engine.tensors, used)


def assert_equal(tensors, wanted):
    for name, tensor in tensors.items():
        assert torch.equal(tensor, wanted[name]) if tensor.numel() else name not in wanted, name


TAKEN = {
    "first rows": lambda whole: whole[:4],
    "last rows": lambda whole: whole[4:],
    "first of first rows": lambda whole: whole[:4, :3],
    "first of even rows": lambda whole: whole[::2, :3],
    "last of odd rows": lambda whole: whole[1::2, 3:],
    "inner columns": lambda whole: whole[:, 1:5],
}


def test_each_of_many_tensors_of_one_shape_is_cut_as_it_is_used():
    state = {name: torch.arange(48.0).view(8, 6) + 100 * number for number, name in enumerate(TAKEN)}
    held = {name: torch.zeros(cut(state[name]).shape) for name, cut in TAKEN.items()}

    def load(pairs):
        for name, tensor in pairs:
            held[name].copy_(TAKEN[name](tensor))

    slices = MapSlices(mb.map_engine(specs_of(state), lambda: held, load).map)
    sent = {}
    for name, tensor in state.items():
        rows, columns = slices.taken(name, (0, 1))
        sent[name] = tensor[rows][:, columns]
        assert torch.equal(sent[name], TAKEN[name](tensor)), name
    assert slices.narrowed(specs_of(sent)).problems() == []
    for other, message in (
        (
            {"first rows": state["first rows"].flatten()},
            r"first rows: expected the shape \(8, 6\) or a slice of it, found",
        ),
        ({"last rows": state["last rows"][:3]}, r"last rows: expected the shape \(8, 6\), or \(4, 6\) of its slices"),
        ({"last rows": state["last rows"].int()}, "last rows: expected torch.float32, found torch.int32"),
        ({"another": state["last rows"]}, "another: expected no such HF tensor, found torch.float32"),
    ):
        with pytest.raises(TransferError, match=message):
            slices.narrowed(specs_of({**sent, **other}))
    with pytest.raises(TransferError, match="last rows: expected it, found none"):
        slices.narrowed(specs_of({name: tensor for name, tensor in sent.items() if name != "last rows"}))


def test_a_copy_that_goes_on_in_the_next_row_reads_all_rows():
    """It copies from four rows of five. The rows could be found, but no engine needs it."""
    for first, rows in ((1, [0]), (6, [1]), (2, [0, 1, 2, 3]), (8, [0, 1, 2, 3])):
        assert _read([BoxCopy(first, 0, (Dim(4, 1, 1),))], (4, 5), 0).tolist() == rows


def test_a_map_of_other_tensors_is_no_target():
    hf = FAMILIES["tied"]
    state = random_state(hf)
    held = held_by(hf, ParallelDims(tp=2, sp=True), state)
    engine = Slices(hf, state, EngineRank(tp=2))
    specs = [spec for spec in specs_of(state) if spec.name != "model.norm.weight"]
    known = mb.map_engine(specs, lambda: engine.tensors, engine.load).map
    with pytest.raises(TargetError, match=r"model\.norm\.weight: expected no such HF tensor, found \(.*\(1 in all\)"):
        fake_mesh.export_to(held, [known, "nothing"])
    sent = {name: tensor[:2] if name == "model.embed_tokens.weight" else tensor for name, tensor in state.items()}
    with pytest.raises(TransferError, match=r"embed_tokens.weight: expected the shape \(97, .*found \(2, "):
        MapSlices(known).narrowed(specs_of(sent))
