"""The text of cli.md: the commands and their options, as ``--help`` has them."""

from collections.abc import Iterator
from typing import Any

import typer

from mcore_bridge.commands.app import app

KEYS = {
    "verify": {
        "good": "whether nothing differs; then the exit code is 0",
        "folder": "the checkpoint",
        "model_type": "of its config",
        "tower": "whether its models of images are built",
        "mesh": "sizes by axis, `sp`, and the `layout` or null",
        "ranks": "processes that were started",
        "dtype": "of the model",
        "parameters": "of the whole model",
        "tensors": "number of tensors that were compared",
        "bytes": "of these tensors",
        "rank_bytes": "parameters of the fullest rank",
        "seconds": "time of the slowest rank, by phase",
        "different": "names whose bits differ",
        "saved_different": "names that differ in the folder of `--save`; null without it",
        "adapter_different": "names of tensors of `--adapter` whose bits differ; null without it",
        "logits": "`difference`, `relative`, `tolerance`, `count` and `images`; `varied`: names of tensors with "
        "one value or equal to another, which got random changes on both sides; `untold`: names of such tensors that "
        "are "
        "encoded and got no changes. null if logits were left out. A NaN is null",
        "logits_left_out": "the reason why logits were left out, or null",
        "carried": "names that a save copies, and no parameter uses",
        "unused": "names that nothing uses",
        "drawn": "names of MTP layers that the files lack",
        "notes": "about fields of the config that change nothing",
    },
    "plan": {
        "model_type": "of the text",
        "tower": "as of `verify`",
        "mesh": "as of `verify`",
        "ranks": "of the whole job",
        "dtype": "of the parameters",
        "parameters": "of the whole model",
        "stages": "by pipeline rank and virtual stage: `pp`, `vp`, `layers`, `tower`, `embedding`, `mtp`, "
        "`output`, and `parameters`, `bytes` and `expert_bytes` of one rank",
        "export": "`ranks`, `messages`, `seconds`, and for the fullest rank `sent`, `weights`, `received` and "
        "`memory` in "
        "bytes",
        "engine": "`messages`, `sent`, `received`, `total`, `memory` (bytes), `seconds`; null without `--engine-*`",
        "notes": "as of `verify`",
    },
    "plan --gpus": {
        "gpus": "ranks of the job",
        "gpu_bytes": "memory that a rank may use",
        "batch": "`sequence`, `micro_batch`, `recompute`",
        "suggestions": "best first: `mesh`, `dp`, `edp`, `memory` (bytes by part, and their `total`), `export_seconds`",
        "too_large": "meshes that do not fit: `mesh`, and `bytes` of its fullest rank, smallest first",
        "refused": "meshes that cannot be built: `reason`, and the `meshes`",
    },
    "convert": {
        "target": "the folder that was written",
        "kind": "its format",
        "parameters": "number of parameters; if no model was built, number of tensors",
        "bytes": "size of these",
        "files": "names in the target",
        "kept": "how many of them an earlier run had written",
        "carried": "as of `verify`",
        "unused": "names that nothing uses",
    },
    "merge": {
        "target": "the folder that was written",
        "kind": '`"hf"`',
        "parameters": "number of tensors",
        "bytes": "size of these",
        "files": "names in the target",
        "kept": "how many of them an earlier run had written",
        "carried": "always empty",
        "unused": "always empty",
    },
    "draw": {
        "target": "the folder that was written",
        "parameters": "of the whole model",
        "tensors": "number of tensors",
        "bytes": "size of these",
        "files": "names in the target",
    },
    "doctor": {
        "ready": "whether nothing must be changed; then the exit code is 0",
        "conclusion": "the last line of the text output",
        "lines": "`name`, `state`, `advice`, and `is_problem`: whether nothing works before the advice is followed",
    },
}
"""By command, the keys of the object that ``--json`` prints, with their meaning (``commands/as_json.py``)."""

HEAD = """# Command line

Made from the options of `mcore-bridge` by `docs/tools/make_families.py`; CI checks that it is up to date. Every command
exits with 1 and one message if something fails, and with 2 if an option or argument is wrong; `--debug` adds
the traceback.

```sh
mcore-bridge verify path/of/Qwen3-8B --tp 2 --pp 2 --vp 2     # is it exact, does it compute what transformers does?
mcore-bridge plan path/of/config --tp 8 --pp 16 --world 1024 --layout balanced --picture plan.svg
mcore-bridge convert path/of/step_200 path/of/result          # a checkpoint of megatron-core to HF, or the other way
mcore-bridge merge path/of/Qwen3-8B path/of/adapter path/of/result   # an adapter into the weights
mcore-bridge draw path/of/config path/of/random               # random weights, to try the others with
mcore-bridge doctor                                           # what is installed, and what works with it
```
"""

JSON = """## For scripts

With `--json` a command prints one object on one line, and nothing else to stdout: progress and errors go to stderr.
After an error the object is `{"error": "..."}`. The exit code is then 1, or 2 if an option, an argument or a command
is wrong. Bytes are whole numbers. Names are the names in the HF files.

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
    """A table of the keys of each object."""
    for command, keys in KEYS.items():
        yield from (f"| `{command}` | |", "|---|---|")
        yield from (f"| `{key}` | {said} |" for key, said in keys.items())
        yield ""


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
