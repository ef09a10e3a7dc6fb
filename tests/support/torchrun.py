"""A script under torchrun, as users start it."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.gpus import free_port

ROOT = Path(__file__).parent.parent.parent


def torchrun(script: Path, num_ranks: int, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run ``script`` on CPU in ``num_ranks`` processes, and return how it ended and what it printed."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    command = [*run, "--master-port", free_port(), str(script), "--device", "cpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
