"""Runs the command in this process."""

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

from typer.testing import CliRunner, Result

from mcore_bridge.commands.app import app
from mcore_bridge.launch.processes import run_ranks
from tests.support import pool

PYTHON = re.compile(
    r"\b((tp|pp|vp|cp|ep|etp|sp|layout|dtype|backend|device|strict\w*|mtp_num_layers|load_weights)=|mb\.)"
)
"""Parts of messages for callers from Python. They must not be in messages of the command."""


def run(*arguments: object, start: bool = False) -> Result:
    """Run the command. Its ranks run in the pool, which has imported everything, unless they must be started."""
    with mock.patch("mcore_bridge.commands.verify.verify.run_ranks", run_ranks if start else ranks_in_pool):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])


def ranks_in_pool(function: Callable[..., Any], task: Any, *, world_size: int, device: str, on_event: Any) -> list[Any]:
    """Like ``run_ranks``, but it raises the rank's own error, and reports no progress."""
    if device == "cuda":
        return run_ranks(function, task, world_size=world_size, device=device, on_event=on_event)
    return pool.run(world_size, quietly, function, task)


def quietly(function: Callable[..., Any], task: Any) -> Any:
    """Runs in a worker."""
    return function(task, lambda *event: None)


def refused(result: Result) -> str:
    """The single message of a refused command."""
    assert result.exit_code in (1, 2), result.output
    assert "Traceback" not in result.output
    (message,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert not PYTHON.search(message), message
    return message
