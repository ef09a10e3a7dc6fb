"""A trainer of ``WeightSync`` in tests, with engines in processes of their own, on a CPU or on GPUs."""

import contextlib
import itertools
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import mcore_bridge as mb
from mcore_bridge.errors import TransferError
from mcore_bridge.sync.routes import ACROSS, Route
from mcore_bridge.weights import agreement
from mcore_bridge.weights.engine import across_ranks, pull_writer, writer
from mcore_bridge.weights.ipc.shared_memory import allocate
from mcore_bridge.weights.model_tensors import held_tensors
from tests.support import pool
from tests.support.stand_in import HF_FIELDS, Sizes, held_bits, loaded
from tests.support.strategies import random_state, tiny
from tests.support.sync_engine import Client, serve

TP1, TP2, PP2 = [(1, 0)], [(2, 0), (2, 1)], [(1, 0, 2, 0), (1, 0, 2, 1)]


class Trainer:
    """A rank of the trainer; rank 0 has the clients."""

    def __init__(self, dims, device="cpu"):
        dims.initialize(device=device)
        self.hf, self.device = tiny("qwen3_moe", **HF_FIELDS), torch.empty(0, device=device).device
        self.models = mb.build_model(self.hf, dims=dims, dtype=torch.bfloat16, device=device, load_weights=False)
        self.is_lead = dist.get_rank() == 0

    def step(self, seed):
        self.state = random_state(self.hf, seed=seed, dtype=torch.bfloat16)
        mb.load_hf_weights(self.models, self.state)

    def move(self, tensors_between):
        """Bring all weights into one mapped file, as DDP has them in one buffer; some are left out between them."""
        self.memory = into_one_file([*held_tensors(self.models).values()], self.device, tensors_between)

    def has(self, client, workers, **sizes):
        """On rank 0: whether each worker has the bits that its own loader would write."""
        wanted = [held_bits(loaded(self.state, *each, sizes=Sizes(**sizes))) for each in workers]
        return not self.is_lead or client.ask("held") == wanted


def into_one_file(tensors, device=None, between=0):
    """Move tensors into one mapped file, with some times 16 bytes between them; all of its bytes."""
    starts = torch.tensor([0, *(-(-t.nbytes // 16) * 16 + 16 * between for t in tensors)]).cumsum(0).tolist()
    memory = allocate(starts[-1], device or torch.device("cpu"))
    for tensor, start in zip(tensors, starts, strict=False):
        place = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        tensor.data = place.copy_(tensor)
    return memory


def engines(folder, *each, started=pool.started):
    """Processes for some engines; the addresses of their workers."""
    addresses, processes = [], []
    for number, (workers, options) in enumerate(each):
        of_engine = [os.path.join(folder, f"{number}-{rank}") for rank in range(len(workers))]
        arguments = [
            (at, w, options, rank, len(workers)) for rank, (at, w) in enumerate(zip(of_engine, workers, strict=True))
        ]
        processes += started(serve, arguments)
        addresses.append(of_engine)
    return addresses, processes


def on_its_own(trainer):
    """Give one parameter memory of its own, which is not the first of its allocation."""
    embedding = held_tensors(trainer.models)["embedding.word_embeddings.weight"]
    trainer.alone = allocate(embedding.nbytes, trainer.device)
    embedding.data = trainer.alone.view(embedding.dtype).view(embedding.shape)


def exchange(trainer):
    """Let two matrices of one shape exchange their memory."""
    matrices = [tensor for tensor in held_tensors(trainer.models).values() if tensor.dim() == 2]
    first, second = next(pair for pair in itertools.combinations(matrices, 2) if pair[0].shape == pair[1].shape)
    first.data, second.data = second.data, first.data


CHANGES = {
    "none": (lambda trainer: None, True),
    "all in other memory": (lambda trainer: trainer.move(0), True),
    "other places": (lambda trainer: trainer.move(1), False),
    "one on its own": (on_its_own, False),
    "two exchanged": (exchange, False),
    "nothing again": (lambda trainer: None, True),
}
"""What happens to the trainer's memory between two rounds, and whether the copies of the last round are right then."""


def repeated(folder, transport, device="cpu"):
    """For each change: whether the engine has all bits, and whether the round went without a second run.

    On a CPU also whether the trainer's memory is still mapped behind that.
    """
    trainer = Trainer(mb.ParallelDims(), device)
    trainer.step(0)
    trainer.move(0)
    client, found = Client(folder), []
    with mb.WeightSync(trainer.models, client, transport=transport, timeout=60) as sync:
        sync()
        for seed, (change, _) in enumerate(CHANGES.values(), 1):
            change(trainer)
            trainer.step(seed)
            with mock.patch.object(writer, "run_messages", side_effect=writer.run_messages) as whole:
                sync()
            found.append((trainer.has(client, TP1), not whole.called))
        if device != "cpu":
            return found
        old = os.stat(trainer.memory.untyped_storage().filename).st_ino
        trainer.move(0)
        with open("/proc/self/maps") as maps:
            found.append(any(f" {old} " in line for line in maps))
    return found


PLAIN = {"router": torch.bfloat16}


def _noting(order, name, function):
    """``function``, which notes its name in ``order`` first."""

    def noted(*args, **kwargs):
        order.append(name)
        return function(*args, **kwargs)

    return noted


def _copies(order):
    """How often a rank has copied before and after ``takes``, for each row of engines."""
    rows = " ".join(order).split("begin")[1:]
    return [tuple(part.count("_copy") for part in row.split("takes")) for row in rows]


@mock.patch.object(across_ranks, "PART_BYTES", 1 << 12)
def by_all(addresses, dims, kinds, transport, device="cpu"):
    """For each round: whether all engines have all bits, whether messages carried them, and how often this rank copied
    for one row of engines before and after the ranks agreed on a plan. Workers that pull copy themselves.
    """
    trainer, found = Trainer(dims, device), []
    trainer.move(0)
    across, order = ACROSS[transport], []
    opened = "_shared" if transport == "shards" else "_opened"
    linked = (across_ranks, "open_all") if transport == "shards" else (pull_writer, "digest_of")
    clients = [Client(each) for each in addresses] if trainer.is_lead else ()

    def send(sync, seed):
        trainer.step(seed)
        order.clear()
        noted = {name: getattr(across, name) for name in ("begin", "takes", "_copy") if hasattr(across, name)}
        with contextlib.ExitStack() as patches:
            for name, function in noted.items():
                patches.enter_context(mock.patch.object(across, name, _noting(order, name, function)))
            messages = mock.patch.object(writer, "run_messages", side_effect=writer.run_messages)
            messages = patches.enter_context(messages)
            reports = sync().workers
        assert {worker.transport for worker in reports} == {transport}
        assert all(("no link" in worker.reason) == messages.called for worker in reports)
        has = [trainer.has(clients[n] if clients else None, workers, **PLAIN) for n, workers in enumerate(kinds)]
        found.append((all(has), messages.called, _copies(order)))

    is_last = dist.get_rank() == dist.get_world_size() - 1
    way = transport if transport == "pull" else None
    with mb.WeightSync(trainer.models, clients, transport=way, timeout=60) as sync:
        send(sync, 0)
        trainer.move(1)
        send(sync, 1)
        send(sync, 2)
        if is_last:
            exchange(trainer)
        send(sync, 3)
        if trainer.is_lead:
            clients[0].ask("move")
        send(sync, 4)
        agreement._plans.clear()  # a new plan, before no worker takes weights
        gone = mock.patch.object(Route, opened, side_effect=TransferError("gone"))
        with gone, pytest.raises(TransferError, match=r"found \d+ failures: .* of engine 0: gone"):
            sync()
        if trainer.is_lead:
            sync.set_engines(clients[:1])
        clients, kinds = clients[:1], kinds[:1]
        send(sync, 5)
        if trainer.is_lead:
            clients[0].ask("move")
        fails = TransferError("no link") if is_last else None
        with mock.patch.object(*linked, side_effect=fails or getattr(*linked)):
            send(sync, 6)
        send(sync, 7)
    return found


def merged_by_all(addresses, dims, workers):
    """Whether an engine has the bits of merged adapters, which are made anew in each round, and of the set in use."""
    trainer, found = Trainer(dims), []
    client = Client(addresses) if trainer.is_lead else ()
    trainer.step(0)
    for rank, name in enumerate(("first", "second"), 2):
        mb.add_adapters(trainer.models, rank=rank, alpha=4, targets=["q_proj", "down_proj"], name=name)
    with mb.WeightSync(trainer.models, client, merged=True, timeout=60) as sync:
        for seed, name in enumerate(("second", "first", "first")):
            mb.set_adapters(trainer.models, name)
            torch.manual_seed(seed)
            for own, tensor in held_tensors(trainer.models).items():
                if ".adapter." in own:
                    tensor.data.normal_()
            assert {worker.transport for worker in sync().workers} == {"shards"}
            trainer.state = mb.to_hf_state_dict(trainer.models, merged=True)
            found.append(trainer.has(client, workers, **PLAIN))
    return found
