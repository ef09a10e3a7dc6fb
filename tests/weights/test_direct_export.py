"""Shards of a trainer go to an engine's memory by its map: through a ring of slices, or straight into parameters."""

import datetime
import multiprocessing
import os
import signal
from contextlib import closing, contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import mcore_bridge as mb
from mcore_bridge import EngineWriter, ParallelDims, export_into
from mcore_bridge.errors import BridgeError, LostRankError, TransferError
from mcore_bridge.factory.add_adapters import add_adapters
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.agreement import agree_on_plan
from mcore_bridge.weights.engine.mapped_engine import EngineState
from mcore_bridge.weights.model_tensors import held_tensors
from mcore_bridge.weights.plan import all_to_all
from mcore_bridge.weights.plan.boxes import BoxCopy, ByteCopy
from mcore_bridge.weights.transfer.executor import run_messages
from tests.support import pool
from tests.support.stand_in import HF_FIELDS, Sizes, connected, held_bits, loaded, serve_all
from tests.support.strategies import random_state, tiny
from tests.support.target_models import FAMILIES, Slices, expected, specs_of

SIZES = Sizes()
ENGINES = [(2, 0), (2, 1), (1, 0, 2, 0), (1, 0, 2, 1)]
"""Both ranks of an engine with TP2, and both stages of one with PP2."""


class Engine:
    """The engine beside this rank."""

    def __init__(self, address):
        self.pipe = connected(address)

    def __call__(self, method, argument=None):
        self.pipe.send((method, argument))
        return self.answer()

    def answer(self):
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def feed(addresses, dims):
    """Each rank writes to one rank of one of the two engines, in exports that all ranks share."""
    dims.initialize(device="cpu")
    hf = tiny("qwen3_moe", **HF_FIELDS)
    models = mb.build_model(hf, dims=dims, dtype=torch.bfloat16, device="cpu", load_weights=False)
    rank = dist.get_rank()
    engine, arguments = Engine(addresses[rank]), ENGINES[rank]
    manifest = mb.manifest(models)
    engine.pipe.send([TensorSpec(spec.name, spec.shape, spec.dtype) for spec in manifest])
    engine_map = engine.answer()
    slices = mb.manifest(models, target=engine_map)
    alike = mb.manifest(models, target=mb.EngineRank(*arguments, vocab_multiple=SIZES.padded_vocab))
    other = {(spec.name, spec.shape) for spec in slices} ^ {(spec.name, spec.shape) for spec in alike}
    assert not other, other
    assert {spec.name for spec in manifest} == {*engine_map.unused, *(spec.name for spec in slices)}
    with closing(mb.BufferRing(mb.plan_buckets(slices, slot_bytes=1024), "cpu")) as ring:
        engine("ring", (ring.plan, ring.handles()))
        loads_by_round = []

        def load(seed):
            state = random_state(hf, seed=seed, dtype=torch.bfloat16)
            mb.load_hf_weights(models, state)
            return loaded(state, *arguments)

        def check(expected):
            held, num_loads, state = engine("held")
            assert held == held_bits(expected)
            assert state == EngineState("new", engine("sample"))
            loads_by_round.append(num_loads)
            return state.version

        for seed in range(3):
            expected = load(seed)
            for bucket in ring.fill(mb.iter_hf_weights(models, target=engine_map), acknowledged=engine.answer):
                engine.pipe.send(("bucket", bucket.number))
            engine("finish")
            assert check(expected) == seed + 1
        writer = EngineWriter(engine_map, engine("share"))
        for seed in range(3, 8):
            expected = load(seed)
            if seed > 3 and (handles := engine("share")):
                assert seed == 6
                writer = EngineWriter(engine_map, handles)
            options = {"bucket_bytes": (None, 1 << 12)[seed % 2]}
            export_into(models, writer, **options)
            assert writer.program.of is agree_on_plan(models, None, "lm", target=engine_map, **options).program
            engine("complete")
            assert check(expected) == seed + 1
            if seed == 5:
                engine("move")
        assert len(set(loads_by_round)) == 1  # its loader ran for the map, and not for any round
        made = {writer.program.plan.payload.outputs[number].name for number in writer.program.made}
        assert all(name.endswith("mlp.gate.weight") for name in made)  # which the engine casts
        for name in add_adapters(models, rank=2, alpha=8, targets=["q_proj", "v_proj", "down_proj"]).names:
            torch.nn.init.constant_(held_tensors(models)[name], 0.5)
        merged = {name: tensor.clone() for name, tensor in mb.iter_hf_weights(models, merged=True)}
        with pytest.raises(BridgeError, match="found merged=None"):
            export_into(models, writer)
        engine("share")
        export_into(models, writer, merged=True)
        engine("complete")
        assert check(loaded(merged, *arguments)) == 9
        load(9)
        engine("move")
        engine("share")
        export_into(models, writer, merged=False)  # by stale addresses
        with pytest.raises(TransferError, match=r"expected the sender's mark 1, found 0.*wrote to old addresses"):
            engine("complete")
        with pytest.raises(TransferError, match="half old and half new"):
            engine("sample")
    assert engine("close") == []


@contextmanager
def served(folder, engines):
    """The addresses of these engines, whose processes have torch alone."""
    addresses = [str(folder / str(rank)) for rank in range(len(engines))]
    process = multiprocessing.get_context("spawn").Process(target=serve_all, args=(addresses, engines))
    process.start()
    try:
        yield addresses
    finally:
        process.join(10)
        process.kill()


@pytest.mark.parametrize("dims", [ParallelDims(tp=2, pp=2, sp=True)], ids=str)
def test_engines_with_torch_alone_are_fed_from_a_mesh_by_their_maps(dims, tmp_path):
    with served(tmp_path, ENGINES) as addresses:
        pool.run(4, feed, addresses, dims)


def test_copies_of_parts_of_elements_are_not_composed():
    """The HF tensor is made then, and copied from there."""
    whole = ByteCopy(0, 0, 1, 0, rows=2, cols=3, item=4, source_row=12, source_col=4, target_row=12, target_col=4)
    box = BoxCopy.of(0, (6,), (1,), 0, (1,))
    assert sum(each.num_bytes() for each in whole.then(box)) == 24
    for change in ({"target_start": 2}, {"source_row": 14}, {"target_col": 6}):
        with pytest.raises(ValueError, match="bytes that are no whole elements"):
            list(whole._replace(**change).then(box))


def feed_until_killed(rank, addresses, folder):
    """A whole round; in the next, rank 1 is killed when a part of the weights has been written."""
    mock.patch.object(all_to_all, "MIN_WINDOW", 256).start()  # this model is small, and has many messages then
    world = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=world, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=90))
    dims = ParallelDims(tp=2)
    dims.initialize(device="cpu")
    hf, engine = tiny("qwen3_moe", **HF_FIELDS), Engine(addresses[rank])
    models = mb.build_model(hf, dims=dims, dtype=torch.bfloat16, device="cpu", load_weights=False)
    engine.pipe.send([TensorSpec(spec.name, spec.shape, spec.dtype) for spec in mb.manifest(models)])
    writer = EngineWriter(engine.answer(), engine("share"))
    mb.load_hf_weights(models, random_state(hf, seed=0, dtype=torch.bfloat16))
    export_into(models, writer, bucket_bytes=2048)
    engine("complete")
    mb.load_hf_weights(models, random_state(hf, seed=1, dtype=torch.bfloat16))
    assert engine("share") is None

    def messages(*arguments, **options):
        for number, pairs in enumerate(run_messages(*arguments, **options)):
            if (rank, number) == (1, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            yield pairs

    with (
        mock.patch("mcore_bridge.weights.engine.writer.run_messages", messages),
        pytest.raises(LostRankError, match="1 "),
    ):
        export_into(models, writer, bucket_bytes=2048)
    with pytest.raises(TransferError, match="expected the sender's mark 2, found 1: the sender did not end this round"):
        engine("complete")


def test_a_trainer_that_is_killed_amid_a_sync_leaves_engines_that_know_it_and_take_another(tmp_path):
    with served(tmp_path, ENGINES[:2]) as addresses:
        ranks = pool.started(feed_until_killed, [(rank, addresses, str(tmp_path)) for rank in (0, 1)])
        for process in ranks:
            process.join(120)
        assert [process.exitcode for process in ranks] == [0, -signal.SIGKILL]
        old, new = (random_state(tiny("qwen3_moe", **HF_FIELDS), seed=seed, dtype=torch.bfloat16) for seed in (0, 1))
        for address, arguments in zip(addresses, ENGINES[:2], strict=True):
            engine = Engine(address)
            held, _, state = engine("held")
            assert state == EngineState("half", None)
            assert all(held != held_bits(loaded(pairs, *arguments)) for pairs in (old, new))
            with pytest.raises(TransferError, match="half old and half new"):
                engine("sample")
            writer = EngineWriter(engine("map"), engine("share"))
            writer.write(new.items())
            engine("complete")
            assert engine("held")[::2] == (held_bits(loaded(new, *arguments)), EngineState("new", engine("sample")))
            assert engine("close") == []


def families():
    """Each family is written to an engine beside each rank, from the rank's own shards and from windows."""
    rank = dist.get_rank()
    for family, hf in FAMILIES.items():
        dims = ParallelDims(tp=2, sp=True)
        dims.initialize(device="cpu")
        state = random_state(hf, dtype=torch.bfloat16)
        models = mb.build_model(hf, dims=dims, dtype=torch.bfloat16, device="cpu", load_weights=state)
        state = mb.to_hf_state_dict(models)  # some tensors are fp32
        engine = Slices(hf, state, mb.EngineRank(tp=2, tp_rank=1 - rank))
        memory = engine.share()
        mapped = mb.map_engine(specs_of(state), lambda e=engine: e.tensors, engine.load)
        assert not mapped.map.uncovered
        handles = mapped.share(list(mb.manifest(models)))
        with pytest.raises(TransferError, match="expected handles of an engine with this map"):
            EngineWriter(replace(mapped.map, copies=mapped.map.copies[1:]), handles)
        writer = EngineWriter(mapped.map, handles)
        memory.fill_(0xFF)
        export_into(models, writer)
        mapped.complete()
        wrong = [n for n, t in expected(hf, state, engine.target).items() if not torch.equal(t, engine.tensors[n])]
        assert not wrong, (family, wrong)
        assert not writer.program.made, (family, writer.program.made)


def test_shards_of_each_family_are_written_into_an_engine():
    pool.run(2, families)
