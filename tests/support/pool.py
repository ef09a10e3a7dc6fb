"""A pool of gloo processes that start once and serve the whole session: importing torch costs more than most tests.

``run(world_size, function, *args)`` runs ``function(*args)`` on the first ``world_size`` workers, in a fresh default
process group, and returns the result of each rank. The function must be importable by name from its module. A rank that
raises makes ``run`` raise its error, with rank and traceback in the notes. A rank that hangs ends the pool, and the
next ``run`` starts a new one.

Workers are forked from a server. ``fork_server`` makes it a fork of this process, which has imported the tests.
Python's own server would import everything again. So all workers have one seed for the hashes of strings, where ranks
of torchrun have a seed each. With ``MCORE_BRIDGE_HASH_SEEDS=1`` each worker is started by itself, with its own seed.
This is slower, and finds what depends on the order of a set.
"""

import contextlib
import faulthandler
import fcntl
import functools
import gc
import itertools
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

_GRACE = 10.0  # seconds in which the other ranks may report after the first one failed
_context = multiprocessing.get_context("forkserver")
_jobs = itertools.count()
_workers: list["_Worker"] = []


@dataclass
class _Worker:
    process: Any
    pipe: Any


class PoolTimeoutError(Exception):
    """A rank did not come back in time; the stacks of all ranks are on stderr."""


def run(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 180.0) -> list[Any]:
    """Run ``function(*args)`` on ``world_size`` ranks, and return the results by rank.

    Args:
        world_size: ranks of the default process group that the function finds initialised (gloo).
        function: importable by name; it may build any number of meshes, one after the other.
        args: picklable.
        timeout: seconds for all ranks together.
    """
    with _in_turn(world_size):
        return _run(world_size, function, args, timeout)


def fork_server() -> None:
    """Fork this process now. The fork waits, and becomes the server of ``multiprocessing`` as soon as one is needed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (server := os.fork()) == 0:
        _become_server(theirs.fileno())
    theirs.close()
    start = multiprocessing.util.spawnv_passfds

    def begun(path: Any, arguments: list[Any], fds: list[int]) -> int:
        if "forkserver" not in str(arguments[-1]):
            return start(path, arguments, fds)
        multiprocessing.util.spawnv_passfds = start  # a server after this one imports everything by itself
        numbers = [1, 2, *fds]
        socket.send_fds(ours, [pickle.dumps((str(arguments[-1]), {**os.environ}, numbers))], numbers)
        ours.close()
        return server

    multiprocessing.util.spawnv_passfds = begun


def _become_server(asked: int) -> None:
    """Wait to be needed, and run the server with the files that are sent, under their numbers."""
    try:
        _leave_files(asked)
        with socket.socket(fileno=asked) as pipe:
            message, fds, *_ = socket.recv_fds(pipe, 1 << 18, 16)
        if message:
            command, environment, numbers = pickle.loads(message)
            moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(*fds, *numbers) + 1) for fd in fds]
            for fd, number in zip(moved, numbers, strict=True):
                os.dup2(fd, number, inheritable=number <= 2)
            for fd in {*fds, *moved} - {*numbers}:
                os.close(fd)
            os.environ.clear()
            os.environ.update(environment)
            exec(command, {})
    finally:
        os._exit(0)


def _leave_files(kept: int) -> None:
    """Put nothing in the place of the open files, so that their other ends see when the process that has them ends.

    The numbers stay in use, since objects of the process that was forked may close them.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd != kept:
            with contextlib.suppress(OSError):  # the listing itself was open
                os.fstat(fd)
                os.dup2(nothing, fd, inheritable=False)


def started(function: Callable[..., Any], arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Start new processes without a process group, one for each tuple of arguments, forked from the pool's server."""
    _grow(1)  # starts the server, which imports everything
    processes = [_context.Process(target=function, args=each) for each in arguments]
    for process in processes:
        process.start()
    return processes


@contextlib.contextmanager
def _in_turn(world_size: int) -> Iterator[None]:
    """Among the workers of pytest-xdist, one job of two ranks and one larger job run at a time.

    More processes would make collectives wait long. A job of one rank has no collectives, so it starts at once.
    """
    name = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if name is None or world_size == 1:
        yield
        return
    size = "pair" if world_size == 2 else "many"
    with (Path(tempfile.gettempdir()) / f"pool-{name}-{size}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def _store() -> Any:
    """The store of all jobs, each with a prefix. With a store in a file, ranks would poll, and a group would take 10 ms
    more.
    """
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@functools.cache
def _joined(port: int) -> Any:
    """This worker's connection to the store. Each new connection asks the name server who 127.0.0.1 is, and a lost
    answer holds up all jobs for 5 s.
    """
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", port, is_master=False)


def _run(world_size: int, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
    _grow(world_size)
    workers = _workers[:world_size]
    store = _store().port, f"job {next(_jobs)}"
    for rank, worker in enumerate(workers):
        worker.pipe.send_bytes(pickle.dumps((list(sys.path), rank, world_size, store)))
        worker.pipe.send_bytes(pickle.dumps((function, args)))
    outcomes = _collect(workers, time.monotonic() + timeout)
    failures = sorted((when, rank) for rank, (when, failed, _, _) in outcomes.items() if failed)
    if len(outcomes) < world_size:
        missing = sorted(set(range(world_size)) - outcomes.keys())
        _stop(dump=not failures)
        if not failures:
            raise PoolTimeoutError(
                f"ranks {missing} of {world_size} did not return from {function.__name__} in {timeout} s"
            )
    if failures:
        rank = failures[0][1]
        _, _, error, text = outcomes[rank]
        error.add_note(f"on rank {rank} of {world_size}:\n{text}")
        raise error
    return [outcomes[rank][2] for rank in range(world_size)]


def _collect(workers: list[_Worker], deadline: float) -> dict[int, tuple[float, bool, Any, str]]:
    outcomes: dict[int, tuple[float, bool, Any, str]] = {}
    waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in multiprocessing.connection.wait(list(waiting), left):
            rank = waiting.pop(pipe)
            try:
                outcomes[rank] = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                outcomes[rank] = (time.time(), True, RuntimeError(f"rank {rank} died"), "")
                deadline = 0.0
            if outcomes[rank][1]:
                deadline = min(deadline, time.monotonic() + _GRACE)
    return outcomes


def _grow(world_size: int) -> None:
    if any(not worker.process.is_alive() for worker in _workers):
        _stop(dump=False)
    _context.set_forkserver_preload(["tests.support.preload"])
    with _python_path():
        while len(_workers) < world_size:
            ours, theirs = _context.Pipe()
            with _own_seed(len(_workers)) as context:
                process = context.Process(target=_serve, args=(theirs,), daemon=True)
                process.start()
            theirs.close()
            _workers.append(_Worker(process, ours))


@contextlib.contextmanager
def _own_seed(rank: int) -> Iterator[Any]:
    """How a worker is started: forked, or with a seed of its own for hashes if the environment asks for this."""
    if not os.environ.get("MCORE_BRIDGE_HASH_SEEDS"):
        yield _context
        return
    with mock.patch.dict(os.environ, PYTHONHASHSEED=str(1 + rank)):
        yield multiprocessing.get_context("spawn")


@contextlib.contextmanager
def _python_path() -> Iterator[None]:
    """The server that workers are forked from starts with the environment's path, not with ours."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.parent.parent), *sys.path])
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH")
        os.environ.update({} if before is None else {"PYTHONPATH": before})


def _stop(*, dump: bool) -> None:
    for worker in _workers:
        if dump and worker.process.is_alive():
            os.kill(worker.process.pid, signal.SIGUSR1)
    time.sleep(0.5 if dump else 0.0)
    for worker in _workers:
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()
    _workers.clear()


def _share_threads_of_gloo() -> None:
    """Give all groups of this process one device. Otherwise each group starts a thread of its own and ends it, and an
    empty job of two ranks takes 25 ms in place of 16 ms.
    """
    from torch.distributed import ProcessGroupGloo

    gloo: Any = ProcessGroupGloo
    own = gloo.__init__
    device = gloo.create_device(hostname="127.0.0.1")

    def with_device(self: Any, store: Any, rank: int, size: int, timeout: Any) -> None:
        options = gloo._Options()
        options._devices, options._timeout = [device], timeout
        own(self, store, rank, size, options)

    gloo.__init__ = with_device


def _serve(pipe: Any) -> None:
    import torch

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    _share_threads_of_gloo()
    while True:
        try:
            path, rank, world_size, store = pickle.loads(pipe.recv_bytes())
            job = pipe.recv_bytes()
        except EOFError:
            return
        sys.path[:] = path
        pipe.send_bytes(_outcome(job, rank, world_size, store))
        gc.collect()  # objects that the frames of the job have held, such as groups of gloo
        gc.freeze()  # the rest are modules, which need not be searched again


def _outcome(job: bytes, rank: int, world_size: int, store: tuple[int, str]) -> bytes:
    when = None  # of the failure itself: leaving the group makes the other ranks fail as well
    try:
        with _process_group(rank, world_size, store):
            try:
                function, args = pickle.loads(job)
                result = function(*args)
            except BaseException:
                when = time.time()
                raise
        return pickle.dumps((time.time(), False, result, ""))
    except BaseException as error:
        when, text = when or time.time(), traceback.format_exc()
        try:
            packed = pickle.dumps((when, True, error, text))
            pickle.loads(packed)
            return packed
        except Exception:
            return pickle.dumps((when, True, RuntimeError(f"{type(error).__name__}: {error}"), text))


@contextlib.contextmanager
def _process_group(rank: int, world_size: int, store: tuple[int, str]) -> Iterator[None]:
    import datetime

    import torch
    import torch.distributed as dist

    from tests.support.stepping import leave_mesh

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    timeout = datetime.timedelta(seconds=60)
    torch.manual_seed(1234)
    port, prefix = store
    own = dist.PrefixStore(prefix, _joined(port))
    dist.init_process_group("gloo", store=own, rank=rank, world_size=world_size, timeout=timeout)
    dist.barrier()  # a rank that leaves at once would close its connections while others still make theirs
    try:
        yield
    finally:
        leave_mesh()
        dist.destroy_process_group()
