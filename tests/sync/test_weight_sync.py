"""A ``WeightSync`` into real engine processes: every bit, every transport, and engines that join and leave."""

import multiprocessing
import os
import pickle
import random
import re
from contextlib import suppress
from unittest import mock

import pytest
import torch

import mcore_bridge as mb
import mcore_bridge.engines
from mcore_bridge.engines.channel import WorkerLine
from mcore_bridge.errors import TransferError
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.bound import bind
from mcore_bridge.weights.engine.mapped_engine import MappedEngine
from mcore_bridge.weights.engine.pull_writer import PullWriter
from mcore_bridge.weights.engine.puller import Puller
from mcore_bridge.weights.model_tensors import held_tensors
from tests.support import pool
from tests.support.near import Near
from tests.support.sync_engine import Client
from tests.support.sync_trainer import (
    CHANGES,
    PLAIN,
    PP2,
    TP1,
    TP2,
    Trainer,
    by_all,
    engines,
    merged_by_all,
    repeated,
)

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [8, 8]}
HIDDEN = "a kernel keeps its weights elsewhere"
MESHES = {
    "TP2": (2, mb.ParallelDims(tp=2), "ring"),
    "PP2 EP2": (4, mb.ParallelDims(pp=2, ep=2), "pull"),
    "one rank": (1, mb.ParallelDims(), "pull"),
}


KINDS = [(TP2, {"shared": True}), (PP2, {}), (TP2, {"elsewhere": True})]
KINDS += [(TP1, {"hidden": HIDDEN}), (TP1, {"hidden": HIDDEN, "elsewhere": True}), *[KINDS[2]] * 2]
SIBLINGS = [None, None, None, (2, 0), (2, 1), (5, 0), (5, 1)]
"""The sibling of each worker elsewhere: three replicas of an engine, and another engine between them."""


def serve_rounds(addresses, dims, transports):
    trainer = Trainer(dims)
    if "pull" in transports:
        trainer.move(0)
    clients = [Client(each) for each in addresses] if trainer.is_lead else ()
    with mb.WeightSync(trainer.models, clients[:-1], timeout=60) as sync:
        for seed in range(3):
            trainer.step(seed)
            if trainer.is_lead and seed:
                sync.set_engines(clients)  # the third replica joins late
            if "pull" in transports and seed:
                trainer.move(seed)  # as after an offload
            report = sync()
            assert report.version == seed + 1
            ways = {worker.engine: worker.transport for worker in report.workers}
            assert list(ways.values()) == transports[: len(ways)], report.workers
            assert len(ways) == len(KINDS) - (not seed)
            siblings = [worker.sibling for worker in report.workers if worker.transport == "network"]
            assert siblings == SIBLINGS[: 7 if seed else 5]
            assert "from siblings" in str(report)
            for number in ways:
                assert trainer.has(clients[number] if clients else None, KINDS[number][0])
            assert [worker.reason for worker in report.workers if "no map" in worker.reason and HIDDEN in worker.reason]
            held = {worker.compared for worker in sync.verify(weights=True, atol=0).weights}
            assert None in held  # the one without a map
            assert all(each is None or each.num_tensors > 10 for each in held)
        mapped = [clients[number] for number in (0, 1, 2, 5, 6) if clients]
        counts = [client.ask("loads") for client in mapped]
        trainer.step(7)
        assert sync(70).version == sync.version == 70
        assert counts == [client.ask("loads") for client in mapped]  # no loader runs in a round
        trainer.step(8)
        if trainer.is_lead:
            clients[2].ask("free")
        with pytest.raises(TransferError, match=r"found 2 failures: stand-in .* of engine 2: .*half new"):
            sync()
        assert all(trainer.has(clients[number] if clients else None, TP2) for number in (5, 6))
        if trainer.is_lead:
            sync.set_engines(clients[5:])
        trainer.step(9)
        after = sync()
        assert after.version == 72  # some engines have weights of version 71
        assert [worker.sibling for worker in after.workers] == [None, None, (5, 0), (5, 1)]
        assert all(trainer.has(clients[number] if clients else None, TP2) for number in (5, 6))
    return [(worker.engine, worker.trainer) for worker in report.workers]


@pytest.mark.parametrize("mesh", MESHES)
def test_every_engine_gets_every_bit_by_the_best_way(mesh, tmp_path):
    world, dims, way = MESHES[mesh]
    addresses, processes = engines(str(tmp_path), *KINDS)
    ways = ["shards", way, "network", "ring", "network", "network", "network"]
    served, *others = pool.run(world, serve_rounds, addresses, dims, ways)
    assert all(each == served for each in others)
    assert {engine for engine, _ in served} == {*range(len(KINDS))}
    assert len({trainer for _, trainer in served}) == world  # all ranks share the workers
    for process in processes:
        process.join(20)
        assert process.exitcode == 0


def one_tensor_engine(trainer):
    """A worker whose engine holds the embedding alone, and a pull into it."""
    specs, wanted = tuple(mb.manifest(trainer.models)), trainer.state["model.embed_tokens.weight"]
    head = torch.nn.Linear(*reversed(wanted.shape), bias=False, dtype=torch.bfloat16)
    worker = mb.engines.EngineWorker(
        head, lambda pairs: head.weight.data.copy_(dict(pairs)["model.embed_tokens.weight"]), name="it"
    )
    writer = PullWriter(worker.ask_map(specs), Near(worker))
    worker.ask_pull(specs, writer.open(held_tensors(trainer.models).values()))
    head.weight.data.zero_()
    return worker, head, writer


def pulled_after_a_failure(of, step):
    """What a round copies in which a step of the engine fails, and whether the next round is right."""
    trainer = Trainer(mb.ParallelDims())
    trainer.step(0)
    trainer.move(0)
    worker, head, pull = one_tensor_engine(trainer)

    def run():
        pull.announce()
        mb.engines.export_into(trainer.models, pull)

    failing = mock.patch.object(of, step, side_effect=TransferError("no such memory"))
    with failing, pytest.raises(TransferError, match="no such memory"):
        run()
    copied, due = bool(head.weight.any()), len(pull._line.answers)
    run()
    worker.ask_complete(1)
    return copied, due, torch.equal(head.weight, trainer.state["model.embed_tokens.weight"])


@pytest.mark.parametrize(("of", "step"), [(Puller, "open"), (MappedEngine, "announce")])
def test_a_pull_that_cannot_begin_copies_nothing_and_leaves_no_answer(of, step):
    assert pool.run(1, pulled_after_a_failure, of, step) == [(False, 0, True)]


class Keeping(torch.nn.Module):
    """An engine that keeps every HF tensor as it comes."""

    def __init__(self, specs):
        super().__init__()
        self.kept = {spec.name: torch.zeros(spec.shape, dtype=spec.dtype) for spec in specs}
        for number, tensor in enumerate(self.kept.values()):
            self.register_buffer(str(number), tensor)

    def load(self, pairs):
        for name, tensor in pairs:
            self.kept[name].copy_(tensor)


def pulled_as_made(dims, options):
    """Whether an engine has all bits after each of three rounds of weights that are made for the round."""
    trainer = Trainer(dims)
    trainer.step(0)
    if "merged" in options:
        mb.add_adapters(trainer.models, rank=2, alpha=4, targets=["q_proj", "down_proj"])
    trainer.move(0)
    specs = tuple(TensorSpec.of(spec.name, spec) for spec in mb.manifest(trainer.models, **options))
    model, found = Keeping(specs), []
    worker = mb.engines.EngineWorker(model, model.load, name="it")
    pull = PullWriter(worker.ask_map(specs), Near(worker))
    worker.ask_pull(specs, pull.open(bind(trainer.models, merged=options.get("merged")).tensors.values()))
    for seed in range(3):
        trainer.step(seed)
        for name, tensor in held_tensors(trainer.models).items():
            if ".adapter." in name:
                tensor.data.normal_(generator=torch.Generator().manual_seed(seed))
        for tensor in model.kept.values():
            tensor.view(torch.uint8).zero_()
        pull.announce()
        mb.engines.export_into(trainer.models, pull, **options)
        worker.ask_complete(seed)
        wanted = mb.to_hf_state_dict(trainer.models, **options)
        assert wanted.keys() == model.kept.keys()
        found.append(
            [
                name
                for name, t in wanted.items()
                if not torch.equal(*(x.view(torch.uint8) for x in (t, model.kept[name])))
            ]
        )
    return found


@pytest.mark.parametrize("dims", [mb.ParallelDims(), mb.ParallelDims(tp=2, ep=2)], ids=["TP1", "TP2 EP2"])
@pytest.mark.parametrize("options", [{"quantize": FP8}, {"merged": True}], ids=["FP8", "merged"])
def test_an_engine_pulls_weights_that_are_made_for_a_round(options, dims):
    assert pool.run(dims.tp, pulled_as_made, dims, options) == [[[]] * 3] * dims.tp


@pytest.mark.parametrize("transport", ["shards", "pull"])
def test_a_round_begins_like_the_last_one_and_is_right_whatever_has_moved(transport, tmp_path):
    (workers,), (process,) = engines(str(tmp_path), (TP1, {"shared": transport == "shards"}))
    wanted = [(True, repeats) for _, repeats in CHANGES.values()]
    assert pool.run(1, repeated, workers, transport) == [[*wanted, False]]  # and no memory is held between rounds
    process.join(20)


@pytest.mark.parametrize(
    ("world", "dims", "transport"),
    [
        (2, mb.ParallelDims(tp=2), "shards"),
        (2, mb.ParallelDims(pp=2), "pull"),
        (4, mb.ParallelDims(pp=2, ep=2), "shards"),
        (4, mb.ParallelDims(tp=2, ep=4), "shards"),
        (4, mb.ParallelDims(tp=2, ep=4), "pull"),
    ],
    ids=["TP2", "PP2 pulled", "PP2 EP2", "TP2 EP4", "TP2 EP4 pulled"],
)
def test_weights_go_from_all_ranks_into_all_engines_until_a_link_is_missing(world, dims, transport, tmp_path):
    """Without messages: all ranks write, or all workers pull."""
    kinds, shared = [TP2, PP2, TP1], transport == "shards"
    addresses, processes = engines(str(tmp_path), *((workers, {"shared": shared, **PLAIN}) for workers in kinds))
    found = pool.run(world, by_all, addresses, dims, kinds, transport)
    for rank, rounds in enumerate(found):
        assert [each[:2] for each in rounds] == [(True, False)] * 6 + [(True, True)] * 2
        copies = [(0, 1), (0, 1), (1, 0), (1, int(rank == world - 1))] if shared else [(0, 0)] * 4
        assert [own for *_, (own, *_) in rounds[:4]] == copies
    for process in processes:
        process.join(20)


def test_a_late_answer_is_not_taken_for_a_later_one():
    near, far = multiprocessing.Pipe()
    line = WorkerLine(near, "worker 0", 0.05)
    with pytest.raises(TransferError, match=r"expected an answer within 0 s"):
        line("more_handles", 1)
    with pytest.raises(BrokenPipeError):
        far.send_bytes(pickle.dumps("late"))
    with pytest.raises(TransferError, match="worker 0: "):
        line("complete", 1)
    with pytest.raises(TransferError, match="worker 0: "):
        line.answer()
    assert "no link" in str(line.failed(TransferError("no link")))


def test_merged_adapters_go_by_messages(tmp_path):
    (workers,), (*processes,) = engines(str(tmp_path), (TP2, {"shared": True, **PLAIN}))
    assert pool.run(2, merged_by_all, workers, mb.ParallelDims(tp=2), TP2) == [[True] * 3] * 2
    for process in processes:
        process.join(20)


@mock.patch("mcore_bridge.weights.plan.all_to_all.PER_HOP", 100)  # so that some die between messages and within them
@mock.patch("mcore_bridge.weights.plan.all_to_all.MIN_WINDOW", 1)
def survive(addresses, dims, rounds):
    """In each round new engines join, and a worker of one of them dies after some messages. One engine stays."""
    trainer, problems = Trainer(dims), []
    kept = Client(addresses.pop(0)) if trainer.is_lead else None
    with mb.WeightSync(trainer.models, kept or (), timeout=60) as sync:
        for seed, (replicas, workers, dying, worker, after) in enumerate(rounds):
            joining = [addresses.pop(0) for _ in range(replicas)] if trainer.is_lead else [()] * replicas
            if seed == len(rounds) // 2:
                trainer.move(0)  # from here on engines that cannot share their memory pull
            if trainer.is_lead:
                joining = [*map(Client, joining)]
                sync.set_engines([kept, *joining])
                joining[dying].tell(worker, after)
            trainer.step(seed)
            try:
                sync()
            except TransferError as error:
                problems.append(str(error))
            else:
                with suppress(EOFError, OSError):  # the worker may have died after its round
                    assert all(trainer.has(each, workers, **PLAIN) for each in joining)
            assert trainer.has(kept, TP2, **PLAIN)
            if replicas > 1:  # the others go on, whether they sent or got
                staying = [each for number, each in enumerate(joining) if number != dying]
                if trainer.is_lead:
                    sync.set_engines([kept, *staying])
                trainer.step(seed + 50)
                assert {worker.transport for worker in sync().workers} == {"shards", "network"}
                assert trainer.has(kept, TP2, **PLAIN)
                assert all(trainer.has(each, workers, **PLAIN) for each in staying)
        if trainer.is_lead:
            sync.set_engines(kept)
        trainer.step(99)
        assert [worker.transport for worker in sync().workers] == ["shards"] * 2
        assert trainer.has(kept, TP2, **PLAIN)
    return problems


NUM_ROUNDS = int(os.environ.get("MCORE_BRIDGE_ROUNDS", "20"))
JOINING = [(1, TP1, {"shared": True, **PLAIN}), (1, TP2, PLAIN), (3, TP1, {"elsewhere": True, **PLAIN})]
"""Replicas of an engine that join at once."""


def test_an_engine_that_dies_at_any_time_harms_no_other(tmp_path):
    chance = random.Random(NUM_ROUNDS)
    kinds, rounds = [(TP2, {"shared": True, **PLAIN})], []
    for number in range(NUM_ROUNDS):
        replicas, workers, options = JOINING[number % 3]
        kinds += [(workers, options)] * replicas
        dying = chance.randrange(replicas), chance.randrange(len(workers))
        rounds.append((replicas, workers, *dying, number // 3 % 6))
    addresses, processes = engines(str(tmp_path), *kinds)
    first, second = pool.run(2, survive, addresses, mb.ParallelDims(tp=2), rounds, timeout=240.0)
    assert first == second
    assert all("engine" in problem for problem in first)
    assert not any(re.search(r"of engine (\d+): [^;]*of engine \1:", problem) for problem in first)  # named twice
    assert len(first) > NUM_ROUNDS // 2
    for process in processes:
        process.join(20)
