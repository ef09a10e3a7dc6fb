"""Maps of an engine's loader: how they are made, what they contain, how they write tensors, and refusals."""

import re
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mcore_bridge as mb
from mcore_bridge.errors import TransferError
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.engine.mapped_engine import MappedEngine
from mcore_bridge.weights.engine.probe import RunningNumbers
from mcore_bridge.weights.engine.prove import _PATTERNS, checksums, drawn_values
from mcore_bridge.weights.engine.recorder import Recorder
from mcore_bridge.weights.engine.rounds_by_map import RoundsByMap
from mcore_bridge.weights.ipc.buckets import plan_buckets
from mcore_bridge.weights.ipc.receiver import Receiver
from mcore_bridge.weights.ipc.sender import BufferRing
from mcore_bridge.weights.ipc.shared_memory import allocate, share
from mcore_bridge.weights.manifest import Manifest, ManifestEntry
from mcore_bridge.weights.plan.boxes import BoxCopy, Dim, merged
from mcore_bridge.weights.plan.engine_map import EngineMap, EngineTensor, SliceCopy
from mcore_bridge.weights.plan.map_slices import MapSlices
from tests.support.stand_in import Sizes, StandIn, differing, loaded, specs

CPU = torch.device("cpu")
SPECS = specs(Sizes())
ENTRIES = tuple(ManifestEntry(spec.name, spec.shape, spec.dtype) for spec in SPECS)
SLOT_BYTES = 1024


def weights(seed):
    return dict(drawn_values(SPECS, seed, CPU))


@pytest.fixture
def ring():
    with closing(BufferRing(plan_buckets(SPECS, slot_bytes=SLOT_BYTES), "cpu")) as ring:
        assert len(ring.plan.buckets) > 3 * ring.plan.num_slots
        yield ring


def send(ring, receiver, engine, pairs):
    for bucket in ring.fill(pairs.items(), acknowledged=lambda: None):
        receiver.copy_into(bucket.number, engine)
    receiver.finish()


# boxes ----------------------------------------------------------------------------------------------------------------


@st.composite
def narrowed(draw, tensor):
    """A slice of ``tensor`` along every dim."""
    for dim, size in enumerate(tensor.shape):
        start = draw(st.integers(0, size - 1))
        tensor = tensor.narrow(dim, start, draw(st.integers(1, size - start)))
    return tensor


def copied(source, target):
    return BoxCopy.of(source.storage_offset(), target.shape, source.stride(), target.storage_offset(), target.stride())


@given(st.data())
def test_a_copy_after_a_copy_is_what_both_do(data):
    rows, cols = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 8))
    source, between = torch.arange(rows * cols * 2).view(rows, 2 * cols), torch.full((rows, 2 * cols), -1)
    first = data.draw(narrowed(source))
    assert copied(first, first).source_end == first.max() + 1
    place = between[: first.shape[0], : first.shape[1]]
    place.copy_(first)
    read = data.draw(narrowed(between.view(rows, 2, cols) if data.draw(st.booleans()) else between))
    read = read.transpose(0, -1) if data.draw(st.booleans()) else read
    target = torch.full(read.shape, -1)
    try:
        both = copied(read, target).after(copied(first, place))
    except ValueError:
        return
    if both is not None:
        sizes, near, far = zip(*both.dims, strict=True) if both.dims else ((), (), ())
        target.as_strided(sizes, far, both.target).copy_(source.as_strided(sizes, near, both.source))
    assert torch.equal(target, read)


def test_a_recorder_follows_copies_through_other_memory():
    parameter, other, parts = torch.zeros(4, 6), torch.zeros(5), torch.zeros(9)

    def load(pairs):
        for name, tensor in pairs:
            if name == "a":
                parameter[:, :2].copy_(torch.cat((tensor, tensor.clone()), 0).t().contiguous().t()[:4])
                parameter[:2, 3:].copy_(torch.stack((tensor[0], tensor[1]))[:, :1].expand(2, 3))
            other.copy_(tensor if name == "b" else tensor.sum() * 2)
            parts[slice(4) if name == "a" else slice(4, 6)].copy_(tensor.flatten()[: 4 if name == "a" else 2])

    recorder, values = Recorder(), {"a": torch.rand(2, 2), "b": torch.rand(5)}
    with recorder:
        load(recorder.watched(iter(values.items())))
    found = torch.zeros(4, 6)
    for piece in recorder.traced(parameter):
        if piece.is_computed:
            continue
        sizes, near, far = zip(*piece.box.dims, strict=True) if piece.box.dims else ((), (), ())
        found.as_strided(sizes, far, piece.box.target).copy_(values["a"].as_strided(sizes, near, piece.box.source))
    assert torch.equal(found, parameter)
    *computed, last = recorder.traced(other)
    assert last.hf == "b"
    assert all(piece.is_computed and piece.names == {"a"} for piece in computed)
    assert [recorder.names_in(part) for part in (parts[:4], parts[4:6], parts[6:])] == [{"a"}, {"b"}, set()]


def test_a_loader_may_write_into_what_it_was_given():
    """A row that the loader zeros is a constant from then on. The other rows come from the HF tensor, without a
    cast.
    """
    parameter, given = torch.zeros(3, 2), torch.rand(3, 2)
    recorder, value = Recorder(), given.clone()
    with recorder:
        for _, tensor in recorder.watched(iter([("a", value)])):
            tensor[1].zero_()
            parameter.copy_(tensor)
    found, (before, *pieces) = torch.ones(3, 2), recorder.traced(parameter)
    assert before.is_computed, "what nobody writes would be"
    for piece in pieces:
        assert not piece.casts
        assert not piece.is_computed
        sizes, near, far = zip(*piece.box.dims, strict=True)
        source = torch.zeros(6) if piece.hf is None else given
        found.as_strided(sizes, far, piece.box.target).copy_(source.as_strided(sizes, near, piece.box.source))
    assert torch.equal(found, parameter)
    assert torch.equal(parameter[::2], given[::2])


def test_a_checksum_sees_every_bit_and_every_place():
    octets = torch.zeros(3 * (1 << 19) + 8 * 5 + 7, dtype=torch.uint8)
    places = [0, 7, 8, (1 << 19) - 64, (1 << 19) - 1, 1 << 19, (1 << 20) + 9, (3 << 19) + 3]
    places += [len(octets) - 7, len(octets) - 1]  # the last eight bytes are mixed like the end of a row
    changed = [octets.clone() for _ in range(2 * len(places))]
    for number, place in enumerate(places):
        changed[2 * number][place], changed[2 * number + 1][place] = 1, 128
    both = octets.clone()
    both[[7, 15]] = 128  # the highest bits of two words
    sums = [*checksums(dict(enumerate([octets, *changed, both, octets.clone(), octets[8:]]))).values()]
    assert len(set(sums)) == 2 * len(places) + 3
    odd = torch.zeros(len(octets) + 1, dtype=torch.uint8)[1:]
    assert checksums({"odd": odd})["odd"] == sums[0] == sums[-2]


@pytest.mark.parametrize("dtype", [*_PATTERNS, torch.int8, torch.int64], ids=str)
def test_drawn_values_have_every_bit_that_a_copy_may_lose(dtype):
    """With even seeds, floats are between 1/8 and 2 in size, of either sign; of other dtypes, all bits are drawn."""
    ((_, drawn),) = drawn_values([TensorSpec("a", (4096,), dtype)], 2, CPU)
    assert drawn.dtype == dtype
    values = drawn.double()
    if dtype.is_floating_point:
        assert 1 / 8 <= values.abs().min() < values.abs().max() <= 2
        assert (values < 0).any() or dtype == torch.float8_e8m0fnu  # which has no sign
    else:
        assert len(values.unique()) > (1 if dtype == torch.bool else 250)


# maps -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "num_loads", "computed"),
    [
        ({}, 2, 0),
        ({"layerwise": True}, 2, 0),
        ({"shuffles": True}, 4, 0),
        ({"threads": True}, 4, 0),
        ({"adds": True}, 7, 2),
        ({"adds": True, "shuffles": True}, 7, 2),
        ({"adds": True, "layerwise": True}, 7, 2),
    ],
)
@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_a_map_does_what_the_loader_does(options, num_loads, computed, tp, rank, ring, tmp_path, caplog):
    model = StandIn(tp, rank, **options)
    engine = mb.map_engine(Manifest(ENTRIES), model, model.load, engine="ours")
    assert model.num_loads == num_loads
    assert engine.map.problems() == []
    assert len(engine.map.uncovered) == caplog.text.count("norm in every round: its loader computes it") == computed
    reason = "its loader computes it: the slices that a probe found give other values"
    assert all(entry.tensor.endswith(".norm") and entry.reason == reason for entry in engine.map.uncovered)
    assert ("head.weight", "embed", 0) in engine.map.aliases
    engine.map.save(tmp_path / "map")
    assert mb.EngineMap.load(tmp_path / "map") == engine.map
    with closing(Receiver(ring.plan, ring.handles())) as receiver:
        for seed in (5, 6, 7):
            send(ring, receiver, engine, weights(seed))
            assert differing(model.held(), loaded(weights(seed), tp, rank, **options)) == []
            model.embed.data = model.embed.data.clone()  # an engine that slept: it has moved
            model.layers[0].constant.data.fill_(torch.nan)  # and it has lost what was in it
    assert model.num_loads == num_loads + (3 if computed else 0)
    assert bool(engine.reason) == ("adds" in options and "layerwise" in options), engine.reason


def test_bits_that_an_engine_keeps_as_another_dtype_are_copied_without_a_cast():
    held, loads, spec = torch.zeros(3, 2, dtype=torch.int16), [], TensorSpec("a", (3, 2), torch.bfloat16)

    def load(pairs):
        loads.append([held.copy_(tensor.view(torch.int16)) for _, tensor in pairs])

    engine = mb.map_engine([spec], lambda: {"words": held}, load)
    assert ([copy.casts for copy in engine.map.copies], engine.map.uncovered, len(loads)) == ([False], (), 2)


def test_a_number_that_a_loader_reads_out_of_a_weight_is_no_constant():
    """All drawn values of one seed have the same largest number. Another seed has another one."""
    held = {name: torch.zeros(1) for name in ("most", "least", "half", "read")}
    held["weight"] = torch.zeros(64, 48, dtype=torch.bfloat16)

    def load(pairs):
        for _, tensor in pairs:
            held["weight"].copy_(tensor)
            held["most"].fill_(float(tensor.float().abs().max()))
            held["least"].fill_(float(tensor.float().abs().min()))
            held["read"].copy_(float(tensor.float().abs().max()))
            held["half"].copy_(0.5)

    engine = mb.map_engine([TensorSpec("a", (64, 48), torch.bfloat16)], lambda: held, load)
    assert [entry.tensor for entry in engine.map.uncovered] == ["most", "least", "read"]
    assert [fill.tensor for fill in engine.map.fills] == ["half"]


def test_a_kept_map_is_proven_by_one_load(ring, caplog):
    model, other = StandIn(), StandIn()
    kept = mb.map_engine(SPECS, model, model.load, engine="ours").map
    engine = mb.map_engine(SPECS, other, other.load, engine="ours", kept=kept)
    assert other.num_loads == 1
    with closing(Receiver(ring.plan, ring.handles())) as receiver:
        send(ring, receiver, engine, weights(3))
    assert differing(other.held(), loaded(weights(3))) == []
    mb.map_engine(SPECS, other, other.load, engine="theirs", kept=kept)
    assert "another engine: expected an engine 'theirs', found 'ours'. A new map is made now" in caplog.text
    assert other.num_loads == 3


# mistakes -------------------------------------------------------------------------------------------------------------


def exchanged(entry):
    """The map with two experts exchanged."""
    swap = {"0": "1", "1": "0"}

    def other(copy):
        head, mark, tail = copy.hf.partition(".experts.")
        number, _, rest = tail.partition(".")
        return replace(copy, hf=f"{head}{mark}{swap.get(number, number)}.{rest}") if mark else copy

    return replace(entry, copies=tuple(map(other, entry.copies)))


def without_one(entry):
    return replace(entry, copies=tuple(copy for copy in entry.copies if copy.tensor != "layers.1.qkv"))


def shifted(entry):
    """A slice that begins a row later in the HF tensor."""
    first = next(copy for copy in entry.copies if copy.hf.endswith("0.self_attn.q_proj.weight"))
    later = replace(first, box=replace(first.box, source=first.box.source + Sizes().hidden))
    return replace(entry, copies=tuple(later if copy is first else copy for copy in entry.copies))


def as_it_is(entry):
    return entry


@pytest.mark.parametrize(
    ("mistake", "tensor"),
    [
        (exchanged, r"layers\.0\.w13"),
        (without_one, r"layers\.1\.qkv: expected 128 elements that are written, found 0"),
        (shifted, r"layers\.0\.qkv"),
        (as_it_is, r"layers\.0\.w13"),  # but the engine's work after loading has changed
    ],
)
def test_a_wrong_map_is_not_accepted(mistake, tensor, ring, caplog):
    model = StandIn(2, 0)
    right = mb.map_engine(SPECS, model, model.load).map
    assert mb.map_engine(SPECS, model, model.load, kept=right).map is right
    assert not caplog.text
    model.up_first = mistake is as_it_is
    engine = mb.map_engine(SPECS, model, model.load, kept=mistake(right))
    assert re.search(f"the kept map .*{tensor}.* A new map is made now", caplog.text), caplog.text
    assert (engine.map == right) == (mistake is not as_it_is)
    with closing(Receiver(ring.plan, ring.handles())) as receiver:
        send(ring, receiver, engine, weights(1))
    other = StandIn(2, 0)
    other.up_first = model.up_first
    other.load(weights(1).items())
    assert differing(model.held(), other.held()) == []


def lost(model):
    del model.layers[1].prepared


def moved_elsewhere(model):
    model.layers[0].w13.data = model.layers[0].w13.data.transpose(0, 1).contiguous().transpose(0, 1)


def untied(model):
    model.head.weight = torch.nn.Parameter(model.embed.clone())


def cast(model):
    model.layers[1].router.data = model.layers[1].router.data.bfloat16()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lost, r"layers\.1\.prepared is missing"),
        (
            moved_elsewhere,
            r"layers\.0\.w13: expected .* strides \(96, 8, 1\).* found .* strides \(8, 32, 1\)",
        ),
        (untied, r"head\.weight: expected memory of embed from element 0 on, found other"),
        (cast, r"layers\.1\.router: expected .*float32, found .*bfloat16"),
    ],
)
def test_an_engine_that_changed_is_fed_by_its_loader(change, message, ring, caplog):
    model, other = StandIn(), StandIn()
    engine = mb.map_engine(SPECS, model, model.load)
    with closing(Receiver(ring.plan, ring.handles())) as receiver:
        send(ring, receiver, engine, weights(0))
        other.load(weights(0).items())
        change(model)
        change(other)
        num_loads = model.num_loads
        send(ring, receiver, engine, weights(1))
        other.load(weights(1).items())
        assert differing(model.held(), other.held()) == []
        assert model.num_loads == num_loads + 1
        assert re.search(message, engine.reason)
        assert re.search(f"the engine's loader loads this round: .*{message}", caplog.text)
        assert (engine.state.weights, engine.require_whole()) == ("new", 2)


def test_an_engine_whose_loader_fails_too_is_half_new(ring):
    model = StandIn()
    engine = mb.map_engine(SPECS, model, model.load)
    with closing(Receiver(ring.plan, ring.handles())) as receiver:
        send(ring, receiver, engine, weights(0))
        model.layers[0].w2.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError):
            send(ring, receiver, engine, weights(1))
        assert "layers.0.w2 has no memory" in engine.reason
        with pytest.raises(TransferError, match="half old and half new"):
            engine.require_whole()


def test_a_round_whose_loader_fails_at_its_end_is_not_completed_afterwards(ring):
    model = StandIn()
    made = mb.map_engine(SPECS, model, model.load)

    def load(pairs):
        model.load(pairs)
        raise RuntimeError("no memory for kernels")

    engine = MappedEngine(made.map, model, load, disproof="as if a proof had failed")
    receiver = Receiver(ring.plan, ring.handles())
    with closing(receiver), pytest.raises(RuntimeError, match="no memory for kernels"):
        send(ring, receiver, engine, weights(0))
    with pytest.raises(TransferError, match="a round that was announced"):
        engine.complete()
    assert engine.state.weights == "half"


def test_what_an_engine_does_after_loading_is_proven_again(ring, caplog):
    model = StandIn()
    engine = mb.map_engine(SPECS, model, model.load, verify_every=1)
    with closing(Receiver(ring.plan, ring.handles())) as receiver:
        for seed in range(5):
            model.up_first = seed > 2
            send(ring, receiver, engine, weights(seed))
            assert bool(engine.reason) == model.up_first
            other = StandIn()
            other.up_first = model.up_first
            other.load(weights(seed).items())
            assert differing(model.held(), other.held()) == []
        assert re.search(r"disagree on 2 tensors, such as layers\.0\.w13", engine.reason)
        assert engine.reason in caplog.text


def test_a_map_is_proven_again_before_every_so_many_rounds(ring):
    model = StandIn()
    engine = mb.map_engine(SPECS, model, model.load, verify_every=2)
    proven = []
    with closing(Receiver(ring.plan, ring.handles())) as receiver:
        for seed in range(5):
            before = model.num_loads
            send(ring, receiver, engine, weights(seed))
            proven.append(model.num_loads > before)
    assert proven == [False, False, True, False, True]


def test_an_engine_knows_whether_its_weights_are_whole(ring):
    model = StandIn()
    engine = mb.map_engine(ring.plan, model, model.load)
    assert engine.state.weights == "half"  # the loader had drawn values
    with closing(Receiver(ring.plan, ring.handles())) as receiver:
        send(ring, receiver, engine, weights(0))
        assert (engine.state.weights, engine.state.version) == ("new", 1)
        broken_off = ring.fill(weights(1).items(), acknowledged=lambda: None)
        receiver.copy_into(next(broken_off).number, engine)
        with pytest.raises(TransferError, match="this engine did not get the previous buckets; begin a round"):
            receiver.copy_into(next(broken_off).number, MappedEngine(engine.map, model, model.load))
        with pytest.raises(TransferError, match="never came"):
            receiver.finish()
        with pytest.raises(TransferError, match="half old and half new"):
            engine.require_whole()
        broken_off.close()
        ring.restart()
        receiver.restart()
        for bucket in ring.fill(weights(1).items(), acknowledged=lambda: None):
            receiver.copy_into(bucket.number, engine)
            if bucket.number == 2:
                model.layers[0].w2.data = torch.zeros_like(model.layers[0].w2)
        with pytest.raises(TransferError, match="moved its tensors in the middle of a round"):
            receiver.finish()
        assert engine.state.weights == "half"
        receiver.restart()
        for bucket in ring.fill(weights(1).items(), acknowledged=lambda: None):
            receiver.copy_into(bucket.number, engine)
        receiver.finish(version=70)
        assert engine.require_whole() == 70
    assert differing(model.held(), loaded(weights(1))) == []


def test_only_a_round_that_was_announced_and_has_all_tensors_is_completed(ring):
    model, seen = StandIn(), []

    def load(pairs):
        try:
            model.load(pairs)
        except TransferError as error:
            seen.append(str(error))
            raise

    engine = mb.map_engine(ring.plan, model, load)
    first = ring.plan.buckets[0]
    slot = torch.zeros(ring.plan.slot_bytes, dtype=torch.uint8)
    of_first = [(piece.name, piece.view(slot)) for piece in first.pieces]
    pairs = list(weights(0).items())

    def refused(message, *calls):
        for call in calls:
            with pytest.raises(TransferError, match=message):
                call()
            assert engine.state.version is None

    unannounced = "expected a round that was announced"
    refused(unannounced, engine.complete, lambda: engine.write(pairs))
    for reason in ("", "a loader takes this round"):
        engine._disproof = reason
        engine.begin(ring.plan)
        engine.write(of_first)
        left = len(SPECS) - len(first.pieces)
        refused(f"{left} of {len(SPECS)} tensors of the round never came, such as model", engine.complete)
        engine.break_off()
        refused(unannounced, engine.complete)
        assert engine.state.weights == "half"
    assert seen == ["the round broke off before all tensors had come"], "a loader must not take it for the end"
    engine._disproof = ""
    (name, tensor), *others = pairs
    for wrong in (tensor[:-1], tensor.double(), tensor.flatten()):
        engine.begin(SPECS)
        refused(f"{name} came as torch.* expected torch", partial(engine.write, [(name, wrong), *others]))
    refused("other came as .* expected no such tensor", lambda: engine.write([("other", tensor)]))
    engine.begin(SPECS)
    engine.write([(name, tensor.mT.contiguous().mT) for name, tensor in pairs if tensor.dim() > 1])
    engine.write([(name, tensor) for name, tensor in pairs if tensor.dim() < 2])
    engine.complete()
    assert engine.require_whole() == 6
    assert differing(model.held(), loaded(weights(0))) == []


def test_memory_is_shared_where_other_processes_can_open_it_and_the_map_can_be_used():
    model, computes = StandIn(), StandIn(adds=True)
    engine = mb.map_engine(SPECS, model, model.load)
    with pytest.raises(TransferError, match="no other process can open; send buckets through a ring"):
        engine.share()
    lost(model)
    with pytest.raises(TransferError, match=r"prepared is missing.* Send buckets: copy_into gives them to the engine"):
        engine.share()
    with pytest.raises(TransferError, match=r"only the engine's loader writes .*norm'.*; send buckets"):
        mb.map_engine(SPECS, computes, computes.load).share()


def test_a_writer_takes_each_tensor_of_its_map_once():
    model = StandIn()
    engine = mb.map_engine(SPECS, model, model.load)
    engine.begin(SPECS)
    sizes = (8, *(part.numel() for part in engine._memory.buffers.tensors))
    memory = [allocate(size, CPU) for size in sizes]
    handles = [share(part, engine.map.digest) for part in memory]
    writer, pairs = mb.EngineWriter(engine.map, handles), list(weights(0).items())
    (name, last), mark = pairs[-1], memory[0].clone()
    for wrong, message in (
        ([*pairs, pairs[0]], f"{pairs[0][0]} came as .* expected no such tensor, or it comes twice; make the map"),
        ([*pairs[:-1], (name, last.double())], f"{name} came as torch.float64 .* expected torch"),
        (pairs[:-1], f"1 tensor never came, such as {name}"),
    ):
        with pytest.raises(TransferError, match=message):
            writer.write(wrong)
        assert torch.equal(memory[0], mark), "it would say that all are there"


def test_a_loader_that_takes_nothing_makes_no_engine(ring):
    """The loader would skip every name, such as names with another prefix."""
    model = StandIn()
    for kept in (None, EngineMap("", tuple(SPECS), (), ())):
        with pytest.raises(TransferError, match=r"copied none of 44: check whether it skips .*embed_tokens"):
            mb.map_engine(ring.plan, model, lambda pairs: [*pairs], kept=kept)


def test_a_second_ring_and_other_groups_are_copied_by_their_own_places(ring):
    """Copies that an engine caches for the buckets of a round are not used for buckets of other sizes."""
    model = StandIn()
    engine = mb.map_engine(ring.plan, model, model.load)
    other = plan_buckets(SPECS, slot_bytes=3 * SLOT_BYTES)
    with closing(BufferRing(other, "cpu")) as second:
        for seed, sender in enumerate([ring, second, ring, second]):
            with closing(Receiver(sender.plan, sender.handles())) as receiver:
                send(sender, receiver, engine, weights(seed))
            assert differing(model.held(), loaded(weights(seed))) == []
    for seed, size in enumerate([7, 11, 1, 7, len(SPECS)]):
        engine.begin(SPECS)
        for bucket in buckets_of(weights(seed), size):
            engine.write(bucket)
        engine.complete()
        assert differing(model.held(), loaded(weights(seed))) == []


def test_groups_of_slices_are_copied_as_slices():
    """One of two ranks gets only the slices that it uses, in groups and in buckets."""
    model = StandIn(2, 1)
    engine = mb.map_engine(SPECS, model, model.load)
    slices, sent = MapSlices(engine.map), {}
    for name, tensor in weights(3).items():
        for dim, indices in enumerate(slices.taken(name, range(tensor.dim()))):
            tensor = tensor.index_select(dim, torch.from_numpy(indices))
        if slices.is_used(name):
            sent[name] = tensor
    assert sum(map(torch.numel, sent.values())) < 0.7 * sum(map(torch.numel, weights(3).values()))
    specs_sent = [TensorSpec.of(name, tensor) for name, tensor in sent.items()]
    engine.begin(specs_sent)
    for bucket in buckets_of(sent):
        engine.write(bucket)
    engine.complete()
    assert differing(model.held(), loaded(weights(3), 2, 1)) == []
    lost(model)
    with pytest.raises(TransferError, match=r"prepared is missing.* The loader takes whole HF tensors, so send these"):
        engine.begin(specs_sent)


def test_another_plan_goes_by_the_loader_unless_tensors_are_missing(ring):
    model = StandIn()
    other = [replace(spec, dtype=torch.float32) if "norm" in spec.name else spec for spec in SPECS[1:]]
    engine = mb.map_engine(other, model, model.load)
    with closing(Receiver(ring.plan, ring.handles())) as receiver:
        send(ring, receiver, engine, weights(0))
        assert differing(model.held(), loaded(weights(0))) == []
        assert re.search(r"embed_tokens\.weight: expected no such HF tensor.*\(10 in all\)", engine.reason)
    engine = mb.map_engine([*SPECS, replace(SPECS[1], name="model.layers.9.input_layernorm.weight")], model, model.load)
    with closing(Receiver(ring.plan, ring.handles())) as receiver:
        send(ring, receiver, engine, weights(1))  # the map does not use the missing tensor
        assert not engine.reason
    short = [spec for spec in SPECS if spec.name != "model.norm.weight"]
    with (
        closing(BufferRing(plan_buckets(short), "cpu")) as ring,
        closing(Receiver(ring.plan, ring.handles())) as receiver,
        pytest.raises(TransferError, match=r"model\.norm\.weight: expected it, found none"),
    ):
        receiver.copy_into(0, engine)
    assert (engine.state.weights, engine.require_whole()) == ("old", 1)


def test_slices_for_another_rank_are_refused_though_they_have_its_shapes():
    """The slices of rank 1 have the shapes of the slices of rank 0."""
    maps = [mb.map_engine(SPECS, model, model.load) for model in (StandIn(2, 0), StandIn(2, 1))]
    plan = plan_buckets(Manifest(ENTRIES, target=maps[1].map.digest))
    with closing(BufferRing(plan, "cpu")) as ring, closing(Receiver(plan, ring.handles())) as receiver:
        with pytest.raises(
            TransferError, match=r"the slices were made for another map: .* export with target= this engine's map"
        ):
            receiver.copy_into(0, maps[0])
        send(ring, receiver, maps[1], weights(0))
    assert [engine.state.version for engine in maps] == [None, 1]


def test_a_file_that_was_changed_is_refused(tmp_path):
    model = StandIn()
    path = tmp_path / "map"
    mb.map_engine(SPECS, model, model.load).map.save(path)
    text = path.read_text()
    path.write_text(text.replace('"engine":""', '"engine":"x"'))
    with pytest.raises(TransferError, match="expected the digest of its text"):
        mb.EngineMap.load(path)
    path.write_text(text.replace("engine map 1", "engine map 9"))
    with pytest.raises(TransferError, match="map 9"):
        mb.EngineMap.load(path)


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),  # a bool is one binary digit of nine
    ],
    ids=str,
)
def test_the_digits_of_running_numbers_come_back_from_any_dtype(dtype):
    numbering, found = RunningNumbers([TensorSpec("a", (20, 25), dtype)], "a"), torch.zeros(20, 25, dtype=torch.int64)
    for place in range(numbering.num_digits):
        ((_, tensor),) = numbering.values(place, CPU)
        assert tensor.dtype == dtype
        found += numbering.digits(tensor, dtype) * numbering.base**place
    assert found.flatten().tolist() == [*range(1, 501)]
    assert (numbering.digits(torch.full((2,), -3.0).to(dtype), dtype) < 0).all() or not dtype.is_signed


def test_an_engine_of_a_dtype_that_torch_cannot_cast_is_named():
    with pytest.raises(TransferError, match=r"no digits of torch\.bfloat16 can be read from torch\.bits8"):
        RunningNumbers(SPECS, ()).digits(torch.empty(3, dtype=torch.bits8), torch.bfloat16)


def test_a_copy_from_a_tensor_that_the_map_does_not_list_is_a_problem():
    tensor = EngineTensor("bias", (1,), (1,), torch.float32)
    one = EngineMap("an engine", (), (tensor,), (SliceCopy("no.such", "bias", BoxCopy(0, 0, ())),))
    assert one.problems()[0].startswith("no.such to bias:")
    assert one.problems()[0].endswith("is out of bounds")


@pytest.mark.parametrize(
    ("first", "start", "then", "message"),
    [
        (Dim(3, 1, 4), 0, Dim(2, 6, 1), r"strides \[1, 4, 6\] do not divide one another"),
        (Dim(6, 1, 1), 0, Dim(2, 4, 1), "a dim ends within a digit"),
        (Dim(2, 1, 1), 3, Dim(2, 4, 1), "a range of a digit goes into the next"),
    ],
)
def test_two_copies_whose_composition_is_no_box_are_not_joined(first, start, then, message):
    with pytest.raises(ValueError, match=message):
        BoxCopy(0, 0, (then,)).after(BoxCopy(0, start, (first,)))


def test_a_box_has_no_dims_of_one_element():
    assert merged([Dim(1, 5, 7), Dim(3, 2, 1)]) == (Dim(3, 2, 1),)


# an engine with another transport ------------------------------------------------------------------------------


def buckets_of(pairs, size=7):
    """Views of one buffer, which the next bucket overwrites."""
    names = list(pairs)
    for first in range(0, len(names), size):
        yield [(name, pairs[name].clone()) for name in names[first : first + size]]


def take_round(rounds, model, pairs):
    by_map = True
    for bucket in buckets_of(pairs):
        if not rounds.take(iter(bucket)):
            by_map = False
            model.load(bucket)
        for _, tensor in bucket:
            tensor.fill_(torch.nan)
    return rounds.finish() and by_map


@pytest.mark.parametrize("options", [{}, {"adds": True}])
def test_buckets_of_another_transport_go_by_a_map_from_the_second_round_on(options):
    model = StandIn(2, 1, **options)
    rounds = RoundsByMap(model, model.load)
    assert rounds.finish() is False  # nothing has come
    for seed in range(4):
        assert take_round(rounds, model, weights(seed)) is (seed > 0)
        assert differing(model.held(), loaded(weights(seed), 2, 1, **options)) == []
    assert rounds.engine.require_whole() == 3
    loads = model.num_loads
    first, *_ = buckets_of(weights(5))
    rounds.take(first)
    with pytest.raises(TransferError, match=r"model\.embed_tokens\.weight .* comes twice"):
        rounds.take(first)
    with pytest.raises(TransferError, match="tensors never came"):
        rounds.finish()
    with pytest.raises(TransferError, match="half old and half new"):
        rounds.engine.require_whole()
    rounds.restart()
    with pytest.raises(TransferError, match=f"{len(SPECS)} tensors never came, such as {SPECS[0].name}"):
        rounds.finish()  # no bucket has come
    assert take_round(rounds, model, weights(6))
    assert differing(model.held(), loaded(weights(6), 2, 1, **options)) == []
    assert options or model.num_loads == loads
