"""A ``WeightSync`` into real engine processes: every bit, every transport, and engines that join and leave."""

import os
import random
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

import mcore_bridge as mb
from mcore_bridge.errors import TransferError
from mcore_bridge.weights.ipc.shared_memory import allocate
from mcore_bridge.weights.model_tensors import held_tensors
from tests.support import pool
from tests.support.stand_in import HF_FIELDS, held_bits, loaded
from tests.support.strategies import random_state, tiny
from tests.support.sync_engine import Client, serve

TP1, TP2, PP2 = [(1, 0)], [(2, 0), (2, 1)], [(1, 0, 2, 0), (1, 0, 2, 1)]
HIDDEN = "a kernel keeps its weights elsewhere"
MESHES = {
    "TP2": (2, mb.ParallelDims(tp=2), "ring"),
    "PP2 EP2": (4, mb.ParallelDims(pp=2, ep=2), "pull"),
    "one rank": (1, mb.ParallelDims(), "pull"),
}


class Trainer:
    """A rank of the trainer; rank 0 has the clients."""

    def __init__(self, dims):
        dims.initialize(device="cpu")
        self.hf = tiny("qwen3_moe", **HF_FIELDS)
        self.models = mb.build_model(self.hf, dims=dims, dtype=torch.bfloat16, device="cpu", load_weights=False)
        self.is_lead = dist.get_rank() == 0

    def step(self, seed):
        self.state = random_state(self.hf, seed=seed, dtype=torch.bfloat16)
        mb.load_hf_weights(self.models, self.state)

    def move(self, tensors_between):
        """Bring all weights into one mapped file, as DDP has them in one buffer; some are left out between them."""
        named = [*held_tensors(self.models).values()]
        starts = torch.tensor([0, *(-(-t.nbytes // 16) * 16 + 16 * tensors_between for t in named)]).cumsum(0).tolist()
        self.memory = memory = allocate(starts[-1], torch.device("cpu"))
        for tensor, start in zip(named, starts, strict=False):
            place = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            tensor.data = place.copy_(tensor)

    def has(self, client, workers):
        """On rank 0: whether each worker has the bits that its own loader would write."""
        return not self.is_lead or client.ask("held") == [held_bits(loaded(self.state, *each)) for each in workers]


def engines(folder, *each):
    """Processes for some engines; the addresses of their workers."""
    addresses, processes = [], []
    for number, (workers, options) in enumerate(each):
        of_engine = [os.path.join(folder, f"{number}-{rank}") for rank in range(len(workers))]
        arguments = [
            (at, w, options, rank, len(workers)) for rank, (at, w) in enumerate(zip(of_engine, workers, strict=True))
        ]
        processes += pool.started(serve, arguments)
        addresses.append(of_engine)
    return addresses, processes


def serve_rounds(addresses, dims, transports):
    trainer = Trainer(dims)
    if "pull" in transports:
        trainer.move(0)
    clients = [Client(each) for each in addresses] if trainer.is_lead else ()
    with mb.WeightSync(trainer.models, clients, timeout=60) as sync:
        for seed in range(3):
            trainer.step(seed)
            if "pull" in transports and seed:
                trainer.move(seed)  # as after an offload
            report = sync()
            assert report.version == seed + 1
            ways = {worker.engine: worker.transport for worker in report.workers}
            assert list(ways.values()) == transports, report.workers
            for number, workers in enumerate((TP2, PP2, TP2, TP1, TP1)):
                assert trainer.has(clients[number] if clients else None, workers)
            assert [worker.reason for worker in report.workers if "no map" in worker.reason and HIDDEN in worker.reason]
            held = {worker.compared for worker in sync.verify(weights=True, atol=0).weights}
            assert None in held  # the one without a map
            assert all(each is None or each.num_tensors > 10 for each in held)
        clients = clients[:3]  # the others have no map
        counts = [client.ask("loads") for client in clients]
        trainer.step(7)
        assert sync(70).version == sync.version == 70
        assert counts == [client.ask("loads") for client in clients]  # no loader runs in a round
    return [(worker.engine, worker.trainer) for worker in report.workers]


@pytest.mark.parametrize("mesh", MESHES)
def test_every_engine_gets_every_bit_by_the_best_way(mesh, tmp_path):
    world, dims, way = MESHES[mesh]
    kinds = [(TP2, {"shared": True}), (PP2, {}), (TP2, {"elsewhere": True})]
    kinds += [(TP1, {"hidden": HIDDEN}), (TP1, {"hidden": HIDDEN, "elsewhere": True})]
    addresses, processes = engines(str(tmp_path), *kinds)
    served, *others = pool.run(world, serve_rounds, addresses, dims, ["shards", way, "network", "ring", "network"])
    assert all(each == served for each in others)
    assert {engine for engine, _ in served} == {0, 1, 2, 3, 4}
    assert len({trainer for _, trainer in served}) == world  # all ranks share the workers
    for process in processes:
        process.join(20)
        assert process.exitcode == 0


def survive(addresses, dims, rounds):
    """In each round a new engine joins, and one of its workers dies after some messages. One engine stays."""
    trainer, problems = Trainer(dims), []
    kept = Client(addresses[0]) if trainer.is_lead else None
    with mb.WeightSync(trainer.models, kept or (), timeout=60) as sync:
        for seed, (address, ((workers, _), dies, after)) in enumerate(zip(addresses[1:], rounds, strict=True)):
            joins = None
            if seed == len(rounds) // 2:
                trainer.move(0)  # from here on engines that cannot share their memory pull
            if trainer.is_lead:
                joins = Client(address)
                sync.set_engines([kept, joins])
                joins.tell(dies, after)
            trainer.step(seed)
            try:
                sync()
            except TransferError as error:
                problems.append(str(error))
            else:
                with suppress(EOFError, OSError):  # the worker may have died after its round
                    assert trainer.has(joins, workers)
            assert trainer.has(kept, TP2)
        if trainer.is_lead:
            sync.set_engines(kept)
        trainer.step(99)
        assert [worker.transport for worker in sync().workers] == ["shards"] * 2
        assert trainer.has(kept, TP2)
    return problems


NUM_ROUNDS = int(os.environ.get("MCORE_BRIDGE_ROUNDS", "20"))


def test_an_engine_that_dies_at_any_time_harms_no_other(tmp_path):
    chance = random.Random(NUM_ROUNDS)
    kinds = [(TP1, {"shared": True}), (TP2, {}), (TP2, {"elsewhere": True})]
    rounds = [(kinds[n % 3], chance.randrange(len(kinds[n % 3][0])), n // 3 % 6) for n in range(NUM_ROUNDS)]
    addresses, processes = engines(str(tmp_path), (TP2, {"shared": True}), *(kind for kind, *_ in rounds))
    first, second = pool.run(2, survive, addresses, mb.ParallelDims(tp=2), rounds, timeout=120.0)
    assert first == second
    assert all("engine" in problem for problem in first)
    assert len(first) > NUM_ROUNDS // 2
    for process in processes:
        process.join(20)
