"""An engine in a process of its own: its methods are asked for through a pipe, which a ``WeightSync`` takes as well."""

import atexit
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def started(make_engine: Callable[..., Any], *arguments: Any) -> Connection:
    """The pipe to ``make_engine(*arguments)`` in a new process, which ends when the pipe does."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=serve, args=(theirs, make_engine, arguments)).start()  # no daemon, which has no workers
    theirs.close()  # an engine that dies is then seen as the end of the pipe
    atexit.register(ours.close)
    return ours


def serve(pipe: Connection, make_engine: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Answer questions of ``ask``, and those of a ``WeightSync``, which are dicts."""
    for name in [name for name in os.environ if name in TORCHRUN or name.startswith("TORCHELASTIC_")]:
        del os.environ[name]  # the engine is no rank of the trainer
    engine = make_engine(*arguments)
    while True:
        try:
            question = pipe.recv()
        except EOFError:
            return
        method, *rest = ("receive", question) if isinstance(question, dict) else question
        try:
            answer = getattr(engine, method)(*rest)
        except Exception as error:
            answer = error
        pipe.send(answer)


def ask(pipe: Connection, method: str, *arguments: Any) -> Any:
    """Call a method of the engine; raises what it raised."""
    pipe.send((method, *arguments))
    answer = pipe.recv()
    if isinstance(answer, Exception):
        raise answer
    return answer
