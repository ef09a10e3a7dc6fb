"""Engines of several processes for tests of ``WeightSync``: each worker has torch, and a stand-in for a model."""

import os
import threading
from multiprocessing.connection import Listener

import torch

from mcore_bridge.engines.channel import tell
from tests.support.stand_in import Sizes, StandIn, connected, held_bits, in_shared_memory


def serve(address, arguments, options, rank, size):
    """One worker, until its pipe ends. It takes messages of a trainer's ``Client``."""
    from mcore_bridge.engines import EngineWorker

    device, memory = torch.device(options.get("device", "cpu")), []
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model = StandIn(*arguments, sizes=Sizes(router=options.get("router", torch.float32)), device=device)
    load = model.load

    def load_into_files(pairs):
        load(pairs)
        memory.append(in_shared_memory(model))  # a loader of this kind makes some tensors anew

    loader = load_into_files if options.get("shared") else load
    names = {"name": f"stand-in {arguments} {options}", "hidden": options.get("hidden", "")}
    worker = EngineWorker(model, loader, **names, rank=rank, size=size)
    if options.get("elsewhere"):
        import mcore_bridge.engines.engine_worker as module

        module.this_machine = lambda: "another machine"
    real, messages_left = worker._answer, []

    def answer(method, given):
        if messages_left:
            messages_left[0] -= 1
            if messages_left[0] == 0:  # within this message or after it
                threading.Timer(0.003 * (os.getpid() % 8), os._exit, [9]).start()
            elif messages_left[0] < 0:
                os._exit(9)
        return real(method, given)

    worker._answer = answer
    with Listener(address) as listener, listener.accept() as pipe:
        while True:
            try:
                message = pipe.recv()
            except EOFError:
                return
            if message == "held":
                pipe.send(held_bits(model.held()))
            elif message == "free":
                model.layers[0].o_proj.untyped_storage().resize_(0)
                pipe.send(None)
            elif message == "move":
                memory.append(in_shared_memory(model))
                pipe.send(None)
            elif message == "loads":
                pipe.send(model.num_loads)
            elif isinstance(message, int):
                messages_left[:] = [message]
                pipe.send(None)
            else:
                try:
                    pipe.send(worker.receive(message))
                except Exception as error:
                    pipe.send(error)


class Client:
    """The client that rank 0 calls. It forwards calls to all workers of one engine."""

    def __init__(self, addresses):
        self.pipes = [connected(address) for address in addresses]

    def __call__(self, info):
        for pipe in self.pipes:
            tell(pipe, dict(info))
        problems = [answer for answer in map(_received, self.pipes) if answer is not None]
        if problems:
            raise problems[0]

    def tell(self, worker, num_messages):
        """Make a worker die some milliseconds after this number of messages of the trainer."""
        self.pipes[worker].send(num_messages)
        assert self.pipes[worker].recv() is None

    def ask(self, message):
        for pipe in self.pipes:
            pipe.send(message)
        return [pipe.recv() for pipe in self.pipes]


def _received(pipe):
    try:
        return pipe.recv()
    except EOFError:
        return RuntimeError("a worker of the engine has died")
