"""The command, run in this process."""

import re

from typer.testing import CliRunner, Result

from mcore_bridge.commands.app import app

PYTHON = re.compile(
    r"\b((tp|pp|vp|cp|ep|etp|sp|layout|dtype|backend|device|strict\w*|mtp_num_layers|load_weights)=|mb\.)"
)
"""What a message has for callers from Python: nobody can type it."""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(result: Result) -> str:
    """The one message of a refusal, in the words of the command line."""
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    (message,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert not PYTHON.search(message), message
    return message
