"""The text of cli.md: the commands and their options, as ``--help`` has them."""

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import typer

from mcore_bridge.commands.app import app
from mcore_bridge.commands.doctor import Diagnosis
from mcore_bridge.commands.draw import Drawn
from mcore_bridge.commands.plan.suggest_report import Search
from mcore_bridge.commands.plan.tables import Planned
from mcore_bridge.commands.run_command import keys_of
from mcore_bridge.commands.verify.folders import FolderComparison
from mcore_bridge.commands.verify.verify import Verdict
from mcore_bridge.commands.written import Written
from mcore_bridge.config.mesh.parallel_dims import ParallelDims

ATTRIBUTE = re.compile(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)
"""A line of ``Attributes``, and those that continue it."""

ANSWERS: dict[str, type] = {
    "verify": Verdict,
    "verify --files-only": FolderComparison,
    "plan": Planned,
    "plan --gpus": Search,
    "convert": Written,
    "merge": Written,
    "draw": Drawn,
    "doctor": Diagnosis,
}
"""By command, the dataclass whose fields and properties are the keys of the object that ``--json`` prints."""

HEAD = """# Command line

Made from the options of `mcore-bridge` by `docs/tools/make_families.py`; CI checks that it is up to date. Every command
exits with 1 and one message if something fails; `--debug` adds the traceback. It exits with 2 if the command line
cannot be read: an argument is missing, an option is unknown, or its value is wrong. An option that would have no effect
is refused in this way, too.

```sh
mcore-bridge verify path/of/Qwen3-8B --tp 2 --pp 2 --vp 2     # is it exact, does it compute what transformers does?
mcore-bridge plan path/of/config --tp 8 --pp 16 --world 1024 --layout balanced --picture plan.svg
mcore-bridge convert path/of/step_200 path/of/result          # a checkpoint of megatron-core to HF, or the other way
mcore-bridge merge path/of/Qwen3-8B path/of/adapter path/of/result   # an adapter into the weights
mcore-bridge draw path/of/config path/of/random               # random weights, to try the others with
mcore-bridge doctor                                           # what is installed, and what works with it
```

A folder that is read may also be a name on the hub, such as `Qwen/Qwen3-0.6B`. Then its snapshot in the local hub cache
is read. `--download` completes the snapshot first, and downloads only the files that the command reads. Each command
reads the config before it looks for weights.
"""

JSON = """## For scripts

With `--json` a command prints one object on one line, and nothing else to stdout: progress and errors go to stderr.
After an error the object is `{"error": "..."}`. The exit code is then 1, or 2 where the command line cannot be
read. Bytes are whole numbers, names are those of the HF files, and a number that is not finite is null. A key with
a dot is one inside an object, or inside each object of a list.

```sh
mcore-bridge plan path/of/config --gpus 64 --json | jq '.suggestions[0].mesh'
```
"""


def page() -> str:
    """The text of the page."""
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    described = [line for name, command in commands.items() for line in _command(name, command)]
    return "\n".join([HEAD, *described, JSON, *_objects()])


def _objects() -> Iterator[str]:
    """A table of the keys of each object, from the docstrings of its class."""
    for command, answer in ANSWERS.items():
        yield from (f"| `{command}` | |", "|---|---|")
        yield from _keys(answer, "")
        yield ""


def _keys(answer: type, inside: str) -> Iterator[str]:
    """The rows of a class, and those of the classes of its fields."""
    attributes = (inspect.getdoc(answer) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    said = {name: " ".join(text.split()) for name, text in ATTRIBUTE.findall(attributes)}
    kinds = vars(sys.modules[answer.__module__])
    for key in keys_of(answer):
        computed = inspect.getdoc(getattr(answer, key)) if key not in said else None
        text = computed[0].lower() + computed[1:] if computed else said[key]
        yield f"| `{inside}{key}` | {text.rstrip('.').replace('``', '`').replace('None', 'null')} |"
        for name in re.findall(r"\w+", answer.__annotations__.get(key, "")):
            if is_dataclass(kind := kinds.get(name)) and kind is not ParallelDims:
                yield from _keys(kind, f"{inside}{key}.")


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
