"""Exports to the ranks of an engine: any pair of layouts, against slices that are cut here by the names of tensors."""

from functools import lru_cache
from itertools import chain
from math import gcd
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import mcore_bridge as mb
from mcore_bridge import EngineRank, ParallelDims, engine_ranks
from mcore_bridge.errors import ExportError, TargetError
from mcore_bridge.trainers.rlinf.weight_reshard import slices_of
from mcore_bridge.weights.manifest import digest
from mcore_bridge.weights.plan import all_to_all
from mcore_bridge.weights.plan.engine_slices import _runs
from mcore_bridge.weights.plan.export_plan import RelayedMessage
from mcore_bridge.weights.plan.inventory import merge_inventories
from mcore_bridge.weights.plan.stream import HEADER
from tests.support import fake_mesh, pool
from tests.support.strategies import problems, random_state, sparse_problems, tiny
from tests.support.target_models import (
    ENGINES,
    EXPERTS,
    FAMILIES,
    GRID,
    SPARSE,
    assert_gets,
    assignments,
    expected,
    held_by,
    ranks_of,
)

BUCKET = 1 << 15


def engines(hf):
    """Sizes that this model can be cut in."""
    heads, groups = hf.num_attention_heads, hf.num_key_value_heads
    rows = (heads, hf.intermediate_size, getattr(hf, "moe_intermediate_size", 0))
    cuts = [tp for tp in (1, 2, 3, 4, 8) if not any(size % tp for size in rows) and not (groups % tp and tp % groups)]
    return st.builds(
        lambda tp, pp, ep: engine_ranks(tp=tp, pp=pp, ep=gcd(ep, tp)),
        st.sampled_from(cuts),
        st.integers(1, hf.num_hidden_layers),
        st.sampled_from([1, 2, 4]) if getattr(hf, "num_experts", 0) else st.just(1),
    )


@settings(max_examples=30, deadline=None)
@given(st.data(), st.one_of(problems(), sparse_problems()), st.sampled_from([1 << 12, 1 << 16, 1 << 22]))
def test_any_model_on_any_mesh_to_any_engine(data, problem, bucket_bytes):
    hf, dims = problem
    state = random_state(hf)
    held = held_by(hf, dims, state)
    ranks = data.draw(engines(hf))
    choices = st.one_of(st.sampled_from(ranks), st.sampled_from(["everything", "nothing", "share"]))
    targets = data.draw(st.lists(choices, min_size=len(held), max_size=len(held)))
    guests = data.draw(st.lists(st.sampled_from([*ranks, "everything"]), max_size=4))
    states, _ = fake_mesh.export_to(held, targets, bucket_bytes=bucket_bytes, guests=guests)
    for target, found in zip([*targets, *guests], states, strict=True):
        assert_gets(found, expected(hf, state, target) if target != "share" else {name: state[name] for name in found})
    shared = [found for target, found in zip(targets, states, strict=False) if target == "share"]
    assert not shared or sorted(chain.from_iterable(shared)) == sorted(expected(hf, state, "everything"))
    for plan in (program.plan for program in fake_mesh.programs_for(held, targets, bucket_bytes=bucket_bytes)):
        message_of = {plan.payload.outputs[i].name: n for n, message in enumerate(plan.messages) for i in message.done}
        for name, number in message_of.items():  # tensors that an engine fuses in one load call
            for fused in (("q_proj", "k_proj"), ("k_proj", "v_proj"), ("gate_proj", "up_proj")):
                if fused[0] in name:
                    assert message_of[name.replace(*fused)] == number


MESHES = {
    "sparse": [ParallelDims(tp=2, pp=2, ep=2, sp=True), ParallelDims(tp=2, ep=2, etp=2, sp=True), ParallelDims(ep=4)],
    "stacked": [ParallelDims(tp=2, ep=2, sp=True), ParallelDims(pp=3, ep=2)],
    "latent": [ParallelDims(tp=4, ep=2, sp=True), ParallelDims(tp=2, pp=3, ep=4, sp=True)],
    "linear": [ParallelDims(tp=2, ep=2, sp=True), ParallelDims(pp=2, ep=2)],
    "sized": [ParallelDims(tp=2, ep=2, sp=True), ParallelDims(pp=2, ep=2)],
}


@lru_cache(maxsize=4)
def held_of(family, dims):
    """The tensors of the ranks of a mesh, cached for all engines."""
    return held_by(FAMILIES[family], dims, random_state(FAMILIES[family]))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_cut_as_engines_cut_it(family, engine):
    hf = FAMILIES[family]
    sizes = dict(ENGINES[engine])
    if sizes.get("ep", 1) > 1 and family in ("tied", "fused"):
        pytest.skip("no experts")
    ranks = ranks_of(sizes)
    state = random_state(hf)
    for dims in MESHES.get(family, [ParallelDims(tp=2, sp=True), ParallelDims(tp=4, pp=3, sp=True)]):
        held = held_of(family, dims)
        targets = [ranks[rank % len(ranks)] for rank in range(len(held))]
        states, _ = fake_mesh.export_to(held, targets)
        for target, found in zip(targets, states, strict=True):
            assert_gets(found, expected(hf, state, target))


THREES = tiny(
    "qwen3_moe",
    vocab_size=192,
    num_hidden_layers=4,
    num_attention_heads=12,
    num_key_value_heads=6,
    num_experts=12,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
)


@pytest.mark.parametrize(
    ("dims", "engine"),
    [
        (ParallelDims(tp=3), {"tp": 2}),
        (ParallelDims(tp=2), {"tp": 3}),
        (ParallelDims(tp=6, pp=2), {"tp": 2, "pp": 3}),
        (ParallelDims(ep=4), {"tp": 3, "ep": 3}),
        (ParallelDims(ep=3, etp=2), {"tp": 6, "ep": 2}),
    ],
    ids=str,
)
def test_layouts_that_do_not_divide_each_other(dims, engine):
    ranks, state = engine_ranks(**engine), random_state(THREES)
    held = held_by(THREES, dims, state)
    targets = [ranks[rank % len(ranks)] for rank in range(len(held))]
    states, _ = fake_mesh.export_to(held, targets)
    for target, found in zip(targets, states, strict=True):
        assert_gets(found, expected(THREES, state, target))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_there_whole_is_cut_alike(family):
    hf = FAMILIES[family]
    state = random_state(hf)
    ((bound, inventory),) = held_by(hf, ParallelDims(), state)
    entries = merge_inventories(bound.mapping, bound.axes, hf.num_hidden_layers, [inventory])
    for sizes in ENGINES.values():
        if sizes.get("ep", 1) > 1 and family in ("tied", "fused"):
            continue
        for target in ranks_of(sizes):
            shares = slices_of(target, bound.mapping, bound.axes, hf.num_hidden_layers, entries)
            found = {share.name: share.of(state[name]) for name, share in shares.items()}
            assert_gets(found, expected(hf, state, target))


@pytest.mark.parametrize(
    ("dims", "sizes", "share"),
    [
        (ParallelDims(tp=2, sp=True), {"tp": 2}, 0.0),  # each rank holds what it gets
        (ParallelDims(tp=4, sp=True), {"tp": 4}, 0.0),
        (ParallelDims(tp=2, pp=2, sp=True), {"tp": 2, "pp": 2}, 0.0),
        (ParallelDims(tp=2, pp=2, sp=True), {"tp": 4}, 0.75),
        (ParallelDims(tp=4, sp=True), {"tp": 2}, 0.75),  # ranks 0 and 3 already hold half of their tensors
    ],
    ids=str,
)
def test_only_what_is_needed_travels(dims, sizes, share):
    hf = tiny(
        "llama", hidden_size=256, intermediate_size=512, num_key_value_heads=4, num_hidden_layers=4, vocab_size=512
    )
    state = random_state(hf)
    held = held_by(hf, dims, state)
    ranks = engine_ranks(**sizes)
    targets = [ranks[rank % len(ranks)] for rank in range(len(held))]
    states, travelled = fake_mesh.export_to(held, targets, bucket_bytes=1 << 20)
    wanted = sum(tensor.nbytes for found in states for tensor in found.values())
    num_messages = len(fake_mesh.programs_for(held, targets, bucket_bytes=1 << 20)[0].plan.messages)
    overhead = num_messages * len(held) ** 2 * (HEADER + 4096)
    assert travelled <= share * wanted * 1.01 + overhead


def sent_by_trainer(programs, num_ranks):
    """Bytes of tensors that the ranks of a trainer send, to whomever."""
    streams = [(plan, plan.streams[rank]) for rank in range(num_ranks) for plan in programs[rank].plans]
    return sum(
        run.rows * run.times * plan.payload.entries[run.entry].row_bytes for plan, stream in streams for run in stream
    )


ENGINE = engine_ranks(tp=2)


def export_to_guests(dims, guests, bucket_bytes=1 << 14):
    """The programs of an export that gives each guest what it wants, and how many ranks the trainer has."""
    state, held = random_state(SPARSE), held_of("sparse", dims)
    nobody = ["nothing"] * len(held)
    states, _ = fake_mesh.export_to(held, nobody, bucket_bytes=bucket_bytes, guests=guests)
    for target, found in zip(guests, states[len(held) :], strict=True):
        assert_gets(found, expected(SPARSE, state, target))
    return fake_mesh.programs_for(held, nobody, bucket_bytes=bucket_bytes, guests=guests), len(held)


@pytest.mark.parametrize("bucket_bytes", [1 << 14, 1 << 17])
@pytest.mark.parametrize("dims", MESHES["sparse"][::2], ids=str)
def test_a_trainer_sends_once_to_replicas_which_pass_it_on(dims, bucket_bytes):
    sums = []
    for guests in (ENGINE, [*ENGINE] * 3, ["everything", ENGINE[1], *ENGINE, *ENGINE, "everything"]):
        programs, first = export_to_guests(dims, guests, bucket_bytes)
        sums.append(sent_by_trainer(programs, first))
        for place, program in enumerate(programs[first:]):
            before = [other for other in range(place) if guests[other] == guests[place]]
            assert program.plan.fed_by == (first + before[-1] if before else None)
            numbers = range(len(program.plan.messages))
            sent, got = (sum(sum(of(number)) for number in numbers) for of in (program.sent, program.received))
            assert sent <= got + len(numbers) * len(programs) * HEADER  # no link carries more than without siblings
    assert sums[0] == sums[1]
    assert sums[2] == sums[0] + sum(tensor.nbytes for tensor in random_state(SPARSE).values())


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (all_to_all, "LAG", 3),  # the windows of the message before
        (RelayedMessage, "passed_on", lambda self, rank: range(len(self.source.contents) * (rank == self.sibling))),
        (RelayedMessage, "pieces", property(lambda self: self.source.pieces)),
    ],
)
def test_a_wrong_window_that_is_passed_on_is_found(owner, name, wrong):
    with mock.patch.object(owner, name, wrong), pytest.raises((AssertionError, RuntimeError)):
        export_to_guests(MESHES["sparse"][0], [*ENGINE] * 3)


@pytest.mark.parametrize("dims", [ParallelDims(ep=4), ParallelDims(tp=2, pp=2, sp=True)], ids=str)
def test_shares_are_equal_and_what_a_rank_has_whole_stays_there(dims):
    held = held_of("sparse", dims)
    states, travelled = fake_mesh.export_to(held, ["share"] * 4)
    sizes = [sum(tensor.nbytes for tensor in found.values()) for found in states]
    largest = max(tensor.nbytes for found in states for tensor in found.values())
    assert max(sizes) - min(sizes) <= 4 * largest
    if dims.ep == 4:
        whole = sum(found[name].nbytes for found in states for name in found if ".experts." in name)
        assert travelled < sum(sizes) - whole // 2


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_what_a_rank_has_itself_is_not_made_all_at_once(tp):
    hf = tiny("llama", hidden_size=256, intermediate_size=512, num_hidden_layers=8, vocab_size=512)
    held = held_by(hf, ParallelDims(tp=4, sp=True), random_state(hf))
    targets = [EngineRank(tp=tp, tp_rank=rank * tp // 4) for rank in range(4)]
    for program in fake_mesh.programs_for(held, targets, bucket_bytes=1 << 19):
        assert program.plan.open_bytes < sum(output.num_bytes for output in program.plan.payload.outputs) / 2


@pytest.mark.parametrize("engine", [engine_ranks(), engine_ranks(tp=2)], ids=["TP1", "TP2"])
def test_a_large_tensor_begins_when_those_before_it_are_complete(engine):
    """Ranks that hold parts of a tensor are not at exactly equal bytes of their streams."""
    hf = tiny("llama", hidden_size=128, intermediate_size=256, num_hidden_layers=4, vocab_size=4096)
    state = random_state(hf)
    held = held_by(hf, ParallelDims(tp=4, sp=True), state)
    targets = [engine[rank % len(engine)] for rank in range(4)]
    for target, found in zip(targets, fake_mesh.export_to(held, targets, bucket_bytes=1 << 18)[0], strict=True):
        assert_gets(found, expected(hf, state, target))
    for program in fake_mesh.programs_for(held, targets, bucket_bytes=1 << 18):
        payload, making = program.plan.payload, set()
        for message in program.plan.messages:
            entries = {
                payload.entries[piece.entry].held.name: payload.destinations[piece.entry] for piece in message.pieces
            }
            making |= {output for places in entries.values() for output, _ in places}
            assert "output_layer.weight" not in entries or len(making) == 1
            making -= set(message.done)


@pytest.mark.parametrize("bucket_bytes", [1 << 14, 1 << 22])
def test_stages_take_turns_to_send_to_each_rank_where_memory_asks_for_it(bucket_bytes):
    """All ranks still send all the time. Fewer tensors are incomplete at once, and exported tensors are equal."""
    hf = tiny("llama", hidden_size=256, intermediate_size=512, num_hidden_layers=8, vocab_size=64)
    state, dims = random_state(hf), ParallelDims(tp=2, pp=4, sp=True)
    held = held_by(hf, dims, state)
    stages = [inventory.ranks["pp"] for _, inventory in held]
    targets = [engine_ranks(tp=2)[rank % 2] for rank in range(8)]
    for target, found in zip(targets, fake_mesh.export_to(held, targets, bucket_bytes=bucket_bytes)[0], strict=True):
        assert_gets(found, expected(hf, state, target))
    programs = fake_mesh.programs_for(held, targets, bucket_bytes=bucket_bytes)
    for number in range(len(programs[0].plan.messages)):
        busy = [[width > HEADER for width in program.plan.messages[number].widths] for program in programs]
        for receiver, senders in enumerate(busy):
            at_once = {stages[sender] for sender, sends in enumerate(senders) if sends} - {stages[receiver]}
            assert len(at_once) <= (1 if bucket_bytes == 1 << 14 else 3)
        num_busy = sum(any(senders[rank] for senders in busy) for rank in range(8))
        assert num_busy >= 6 or not num_busy  # the last message of a turn is empty
    making = max(program.plan.open_bytes for program in programs)
    largest = max(output.num_bytes for output in programs[0].plan.payload.outputs)
    assert making <= 4 * largest if bucket_bytes == 1 << 14 else making > 4 * largest


def grid(dims, hf_fields, turn):
    """Every second engine, from one mesh. In a world with several replicas, all ranks feed engines."""
    hf = tiny("qwen3_moe", **hf_fields)
    dims.initialize(device="cpu")
    state = random_state(hf)
    models = mb.build_model(hf, dims=dims, dtype=torch.float32, device="cpu", load_weights=state)
    rank = dist.get_rank()
    for ranks in (*assignments(), engine_ranks(tp=2, pp=2, layers=(1, 3)))[turn::2]:
        target = ranks[rank % len(ranks)]
        found = dict(mb.iter_hf_weights(models, target=target, bucket_bytes=BUCKET))
        assert_gets(found, expected(hf, state, target))
        specs = mb.manifest(models, target=target, bucket_bytes=BUCKET)
        assert [(s.name, s.shape) for s in specs] == [(n, tuple(t.shape)) for n, t in found.items()]
    assert_gets(mb.to_hf_state_dict(models), state)


@pytest.mark.parametrize("dims", GRID, ids=str)
def test_the_grid_of_trainers_and_engines(dims):
    """Plans of pairs are checked above, without ranks. Here ranks communicate; meshes take turns with the engines."""
    fields = {**EXPERTS, "num_hidden_layers": 4, "mlp_only_layers": [0], "vocab_size": 200, "num_key_value_heads": 2}
    pool.run(4, grid, dims, fields, GRID.index(dims) % 2)


def some_ranks():
    dims = ParallelDims(tp=2, pp=2, sp=True)
    dims.initialize(device="cpu")
    hf = tiny("qwen3", vocab_size=97)
    state = random_state(hf)
    models = mb.build_model(hf, dims=dims, dtype=torch.float32, device="cpu", load_weights=state)
    rank = dist.get_rank()
    for _ in range(2):
        for receivers in ({0}, {1, 3}, set()):
            found = mb.to_hf_state_dict(models, target="everything" if rank in receivers else "nothing")
            assert_gets(found, state if rank in receivers else {})
    pairs = mb.iter_hf_weights(models, target=engine_ranks(tp=4)[rank], bucket_bytes=BUCKET)
    next(pairs)
    if rank % 2:
        pairs.close()  # and goes on sending
    else:
        assert len(dict(pairs)) == len(expected(hf, state, engine_ranks(tp=4)[rank])) - 1
    manifest = mb.manifest(models, target=engine_ranks(tp=4)[rank], digests=True)
    wanted = expected(hf, state, engine_ranks(tp=4)[rank])
    assert {spec.name: spec.sha256 for spec in manifest} == {name: digest(t) for name, t in wanted.items()}


def test_a_set_of_ranks_and_a_rank_that_stops_early():
    pool.run(4, some_ranks, timeout=120)


def fail_amid():
    dims = ParallelDims(tp=2, pp=2, sp=True)
    dims.initialize(device="cpu")
    hf = tiny("qwen3", vocab_size=97)
    models = mb.build_model(hf, dims=dims, dtype=torch.float32, device="cpu", load_weights=random_state(hf))
    target = engine_ranks(tp=4)[dist.get_rank()]
    pairs = mb.iter_hf_weights(models, target=target, bucket_bytes=1)
    next(pairs)
    if dist.get_rank() == 2:
        models[0].decoder.layers[-1].mlp.linear_fc2.weight.untyped_storage().resize_(0)
    with pytest.raises(ExportError, match=r"rank 2 of the group: .*linear_fc2") as caught:
        list(pairs)
    return str(caught.value)


def test_a_failure_amid_reaches_every_rank():
    assert len(set(pool.run(4, fail_amid, timeout=60))) == 1


def test_names_may_count_from_the_first_layer_of_a_stage():
    hf = FAMILIES["tied"]
    state = random_state(hf)
    held = held_by(hf, ParallelDims(tp=2, sp=True), state)
    ranks = engine_ranks(pp=2, layers=(1, 5), local_names=True)
    assert not any(rank.local_names for rank in engine_ranks(pp=2))
    first, last = fake_mesh.export_to(held, ranks)[0]
    assert {name for name in first if "layers" in name} == {name for name in state if ".layers.0." in name}
    for layer in range(5):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        assert torch.equal(last[name], state[f"model.layers.{layer + 1}.mlp.up_proj.weight"])
    assert "model.embed_tokens.weight" in first
    assert torch.equal(last["model.embed_tokens.weight"], state["model.embed_tokens.weight"])  # the head is tied to it


def test_tensors_that_the_engine_keeps_whole():
    state = random_state(SPARSE)
    held = held_by(SPARSE, ParallelDims(tp=2, sp=True), state)
    target = EngineRank(tp=2, tp_rank=1, whole=("model.embed_tokens.*", "*.o_proj.weight"))
    found = fake_mesh.export_to(held, [target, "nothing"])[0][0]
    assert_gets(found, expected(SPARSE, state, target))
    assert found["model.embed_tokens.weight"].shape == state["model.embed_tokens.weight"].shape


def test_a_slice_of_nothing_is_given_out_too():
    hf = tiny("llama", vocab_size=65)
    state = random_state(hf)
    held = held_by(hf, ParallelDims(tp=2, sp=True), state)
    target = EngineRank(tp=4, tp_rank=3)
    found = fake_mesh.export_to(held, [target, "nothing"])[0][0]
    assert found["lm_head.weight"].shape == (0, hf.hidden_size)
    assert_gets(found, expected(hf, state, target))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EngineRank(tp=2, tp_rank=2), "tp_rank below it, found 2 and 2"),
        (lambda: EngineRank(pp=2, pp_rank=-1), "pp_rank below it, found 2 and -1"),
        (lambda: EngineRank(tp=2, etp=2, etp_rank="0"), "etp_rank below it, found 2 and '0'"),
        (lambda: EngineRank(tp=4, ep=2, etp_rank=3), "expected etp= beside etp_rank=3"),
        (lambda: EngineRank(etp=0), "at least 1, found {'etp': 0}"),
        (lambda: EngineRank(cuts=(("lm_head.*", 2, 2),)), r"lm_head\.\*_rank below it, found 2 and 2"),
        (lambda: engine_ranks(ep=0), "at least 1, found {'ep': 0}"),
        (lambda: EngineRank(pp=2, layers=(4,)), "for each of pp=2 stages"),
        (lambda: engine_ranks(tp=2, ep=4), "expected ep to divide tp=2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(make, message):
    with pytest.raises(TargetError, match=message):
        make()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (EngineRank(tp=3), "does not divide 8 attention heads"),
        (EngineRank(pp=2, layers=(1, 1)), "have .* layers, the model 4"),
        (EngineRank(ep=16), "more than 8 experts"),
        (
            EngineRank(ep=1, etp=3),
            r"gate_proj\.weight of shape \[16, 48\] cannot be cut for 3 ranks .*Change tp, or etp",
        ),
        ("all", "everything"),
    ],
)
def test_models_that_cannot_be_cut_so_are_refused(target, message):
    held = held_by(SPARSE, ParallelDims(tp=2, sp=True), random_state(SPARSE))
    with pytest.raises(TargetError, match=message):
        fake_mesh.export_to(held, [target, "nothing"])


@given(st.lists(st.integers(-1, 12), max_size=12, unique_by=lambda place: place if place >= 0 else object()))
def test_runs_are_all_positions_once(places):
    """Neighbours that go to places equally far apart are one run."""
    found = {}
    for offset, size, position, step in _runs(np.array(places, dtype=np.int64)):
        found |= {offset + number: position + number * step for number in range(size)}
    assert found == {offset: place for offset, place in enumerate(places) if place >= 0}
