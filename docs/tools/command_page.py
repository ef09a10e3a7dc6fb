"""The text of cli.md: the commands and their options, as ``--help`` has them."""

from collections.abc import Iterator
from typing import Any

import typer

from mcore_bridge.commands.app import app

HEAD = """# Command line

Made from the options of `mcore-bridge` by `docs/tools/make_families.py`; CI checks that it is up to date. Every command
exits with 1 and one message if something fails; `--debug` adds the traceback.

```sh
mcore-bridge verify path/of/Qwen3-8B --tp 2 --pp 2 --vp 2     # is it exact, does it compute what transformers does?
mcore-bridge plan path/of/config --tp 8 --pp 16 --world 1024 --layout balanced --picture plan.svg
mcore-bridge convert path/of/step_200 path/of/result          # a checkpoint of megatron-core to HF; or the other way
mcore-bridge doctor                                           # what is installed, and what works with it
```
"""


def page() -> str:
    """The text of the page."""
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return "\n".join([HEAD, *(line for name, command in commands.items() for line in _command(name, command))])


def _command(name: str, command: Any) -> Iterator[str]:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [parameter for parameter in command.params if parameter not in arguments]
    words = " ".join(("mcore-bridge", name, *(argument.name.upper() for argument in arguments)))
    yield from (f"## {name}", "", f"`{words}`", "", (command.help or "").strip(), "")
    if not command.params:
        return
    yield from ("| | | default |", "|---|---|---|")
    for parameter in [*arguments, *options]:
        names = parameter.name.upper() if parameter in arguments else parameter.opts[0]
        yield f"| `{names}` | {_cell(parameter.help or '')} | {_default(parameter)} |"
    yield ""


def _default(parameter: Any) -> str:
    if parameter.required:
        return "has to be given"
    value = parameter.default
    return "" if value is None or value is False else f"`{value}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
