"""Another process that reads weights from a sender's slots, like an inference engine, and reports what it read.

It gets only a pipe. It copies weights on a separate stream, as an engine does, and reads the copies only when the round
is over. So a slot that was overwritten too early shows.
"""

import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.ipc.receiver import Receiver
from mcore_bridge.weights.ipc.sender import BufferRing
from mcore_bridge.weights.manifest import Manifest, digest
from tests.support import pool

OPENED, FINISH, CLOSE = "opened", "finish", "close"


def serve(pipe: Connection, environment: Mapping[str, str], seconds: float, dies_at: int | None) -> None:
    """Answer every bucket with its number; the end of a round with digests of all tensors; errors with the error."""
    os.environ.update(environment)
    try:
        receiver = Receiver(*pipe.recv())
    except Exception as error:
        pipe.send(error)
        return
    pipe.send(OPENED)
    loaded: dict[str, Tensor] = {}
    for message in iter(pipe.recv, CLOSE):
        try:
            if message == FINISH:
                receiver.finish()
                pipe.send({name: digest(tensor) for name, tensor in loaded.items()})
                loaded.clear()
                continue
            if message == dies_at:
                os._exit(1)
            with receiver.open(message) as pairs:
                pause(seconds, on_gpu=pairs[0][1].is_cuda)
                loaded.update((name, tensor.clone()) for name, tensor in pairs)
            del pairs
            pipe.send(message)
        except Exception as error:
            pipe.send(error)
    receiver.close()
    pipe.send(CLOSE)


def pause(seconds: float, *, on_gpu: bool) -> None:
    """Keep the current stream busy. On a GPU this returns at once."""
    if on_gpu:
        torch.cuda._sleep(int(seconds * 1e9))
    else:
        time.sleep(seconds)


@contextmanager
def engine(
    ring: BufferRing,
    *,
    environment: Mapping[str, str] | None = None,
    seconds: float = 0.0,
    dies_at: int | None = None,
) -> Iterator[Connection]:
    """The pipe to an engine that has opened the slots of ``ring``. The engine waits ``seconds``, or dies at a
    bucket.
    """
    ours, theirs = multiprocessing.Pipe()
    arguments = (theirs, environment or {}, seconds, dies_at)
    if torch.cuda.is_available():  # CUDA needs a fresh process
        process: Any = multiprocessing.get_context("spawn").Process(target=serve, args=arguments)
        process.start()
    else:
        (process,) = pool.started(serve, [arguments])
    theirs.close()
    try:
        ours.send((ring.plan, ring.handles()))
        assert answer(ours) == OPENED
        yield ours
        if dies_at is None:
            ours.send(CLOSE)
            assert answer(ours) == CLOSE
    finally:
        ours.close()
        process.join(30)
        process.kill()


def send_round(ring: BufferRing, pairs: object, pipe: Connection, **arguments: int) -> dict[str, str]:
    """Send everything once, and return the engine's report."""
    for bucket in ring.fill(pairs, acknowledged=lambda: answer(pipe), **arguments):
        pipe.send(bucket.number)
    pipe.send(FINISH)
    return answer(pipe)


def answer(pipe: Connection) -> object:
    """The next report of the engine; raises the engine's error."""
    said = pipe.recv()
    if isinstance(said, Exception):
        raise said
    return said


def run_example(folder: Path, **environment: str) -> None:
    """The example of docs/guide/handing_on.md, as a file in ``folder``. Its engine gets all weights of its trainer."""
    root = Path(__file__).parent.parent.parent
    block, *_ = re.findall(r"```python\n(.*?)```", (root / "docs" / "guide" / "handing_on.md").read_text(), re.DOTALL)
    (folder / "example.py").write_text(block)
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    command = [sys.executable, "-W", "ignore", "example.py"]
    finished = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=300)
    assert finished.returncode == 0, finished.stderr
    numbers = dict(re.findall(r"the (trainer|engine) has (\d+ tensors, \d+ bytes)", finished.stdout))
    assert numbers["trainer"] == numbers["engine"], finished.stdout
    assert int(numbers["engine"].split()[0]) > 40


def manifest_of(tensors: Mapping[str, Tensor]) -> Manifest:
    """The manifest of given tensors, without a model."""
    return Manifest(tuple(TensorSpec.of(name, t) for name, t in tensors.items()))
