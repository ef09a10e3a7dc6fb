"""Runs a script under torchrun, as users start it, or in forked processes, which is quicker."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

from tests.support import pool
from tests.support.gpus import free_port

ROOT = Path(__file__).parent.parent.parent


def torchrun(script: Path, num_ranks: int, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run ``script`` on CPU in ``num_ranks`` processes, and return the exit code and the output."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    command = [*run, "--master-port", free_port(), str(script), "--device", "cpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def forked(script: Path, num_ranks: int, *arguments: str, seconds: float = 120) -> tuple[list[int | None], str]:
    """The exit codes and outputs of the processes of ``script``. They are forked from a process with torch."""
    port, logs = free_port(), [script.parent / f"{script.stem}-{rank}.log" for rank in range(num_ranks)]
    every = [(str(script), arguments, rank, num_ranks, port, str(log)) for rank, log in enumerate(logs)]
    processes = pool.started(_run_forked, every)
    for process in processes:
        process.join(seconds)
    for process in processes:
        process.kill()
    return [process.exitcode for process in processes], "\n".join(log.read_text() for log in logs)


def _run_forked(script: str, arguments: tuple[str, ...], rank: int, num_ranks: int, port: str, log: str) -> None:
    """The main function of a process of torchrun."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=port, PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    out = os.open(log, os.O_CREAT | os.O_WRONLY)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
