"""The command, run in this process."""

from typer.testing import CliRunner, Result

from mcore_bridge.commands.app import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(result: Result) -> str:
    """The one message of a refusal."""
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    (message,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    return message
