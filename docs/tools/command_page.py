"""The text of cli.md: the commands and their options, as ``--help`` has them."""

from collections.abc import Iterator
from typing import Any

import typer

from mcore_bridge.commands.app import app

KEYS = {
    "verify": {
        "good": "whether nothing differs, as the exit code says",
        "folder": "the checkpoint",
        "model_type": "of its config",
        "tower": "whether its models of images are built",
        "mesh": "sizes by axis, `sp`, and the `layout` or null",
        "ranks": "processes that were started",
        "dtype": "of the model",
        "parameters": "of the whole model",
        "tensors": "that were compared",
        "bytes": "of these",
        "rank_bytes": "parameters of the fullest rank",
        "seconds": "of the slowest rank, by phase",
        "different": "names whose bits differ",
        "saved_different": "names that differ in the folder of `--save`; null without it",
        "adapter_different": "names of tensors of `--adapter` whose bits differ; null without it",
        "logits": "`difference`, `relative`, `tolerance`, `count` and `images`; `varied`: names of tensors that are "
        "flat or equal, so that both sides had random changes; `untold`: names of encoded ones, which had none; "
        "null where they were left out. A NaN is null",
        "logits_left_out": "why, or null",
        "carried": "names that a save copies, and no parameter uses",
        "unused": "names that nothing uses",
        "drawn": "names of MTP layers that the files lack",
        "notes": "on fields of the config that change nothing",
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
        "export": "`ranks`, `messages`, and of the fullest rank `sent`, `weights`, `received` and `memory` in bytes, "
        "and `seconds`",
        "engine": "`messages`, `sent`, `received`, `total`, `memory` (bytes), `seconds`; null without `--engine-*`",
        "notes": "as of `verify`",
    },
    "plan --gpus": {
        "gpus": "ranks of the job",
        "gpu_bytes": "that a rank may need",
        "batch": "`sequence`, `micro_batch`, `recompute`",
        "suggestions": "best first: `mesh`, `dp`, `edp`, `memory` (bytes by part, and their `total`), `export_seconds`",
        "too_large": "`mesh` and `bytes` of its fullest rank, least first",
        "refused": "`reason`, and the `meshes`",
    },
    "convert": {
        "target": "the folder that was written",
        "kind": "its format",
        "parameters": "their number, or that of tensors that no model was made of",
        "bytes": "of these",
        "files": "names in the target",
        "kept": "how many of them an earlier run had written",
        "carried": "as of `verify`",
        "unused": "names that nothing uses",
    },
    "merge": {
        "target": "the folder that was written",
        "kind": '`"hf"`',
        "parameters": "how many tensors",
        "bytes": "of these",
        "files": "names in the target",
        "kept": "how many of them an earlier run had written",
        "carried": "always empty",
        "unused": "always empty",
    },
    "draw": {
        "target": "the folder that was written",
        "parameters": "of the whole model",
        "tensors": "their number",
        "bytes": "of these",
        "files": "names in the target",
    },
    "doctor": {
        "ready": "whether nothing must be changed, as the exit code says",
        "conclusion": "the last line for people",
        "lines": "`name`, `state`, `advice`, and `is_problem` if nothing works before it is followed",
    },
}
"""By command, the keys of the object that ``--json`` prints, and what they say."""

HEAD = """# Command line

Made from the options of `mcore-bridge` by `docs/tools/make_families.py`; CI checks that it is up to date. Every command
exits with 1 and one message if something fails, and with 2 where it was not called as below; `--debug` adds the
traceback.

```sh
mcore-bridge verify path/of/Qwen3-8B --tp 2 --pp 2 --vp 2     # is it exact, does it compute what transformers does?
mcore-bridge plan path/of/config --tp 8 --pp 16 --world 1024 --layout balanced --picture plan.svg
mcore-bridge convert path/of/step_200 path/of/result          # a checkpoint of megatron-core to HF; or the other way
mcore-bridge merge path/of/Qwen3-8B path/of/adapter path/of/result   # an adapter into the weights
mcore-bridge draw path/of/config path/of/random               # random weights, to try the others with
mcore-bridge doctor                                           # what is installed, and what works with it
```
"""

JSON = """## For scripts

With `--json` a command prints one object on one line, and nothing else to stdout: progress and errors go to stderr.
After an error the object is `{"error": "..."}`. The exit code is then 1, or 2 where an option, an argument or a command
is wrong. Bytes are whole numbers, names are those of the
HF files.

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
