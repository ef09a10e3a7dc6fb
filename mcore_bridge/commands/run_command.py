"""The frame of every command: it prints the answer to stdout, and turns an error into one message with the names of
options.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, TextIO

import typer
from rich.console import Console, RenderableType
from rich.text import Text
from typer.core import TyperGroup

from mcore_bridge.commands.options import MESH, UsageError
from mcore_bridge.errors import BridgeError, TargetError, describe, printable

Answer = Callable[[Any, Callable[[Any], RenderableType]], None]
"""Prints the answer of a command: as a report that the given function makes, or as JSON (``plain``) for ``--json``."""

_AXES = frozenset({"tp", "pp", "vp", "cp", "ep", "etp", "sp"})
_OPTION_OF = {"mtp_num_layers": "mtp", "expert_tensor_parallel_size": "etp"}
"""Arguments whose option has another name, each with that name."""

_NOISY = ("", "torch.utils.cpp_extension")
"""Loggers whose warnings a command does not print: the root, and one that tells of CUDA on machines without."""
_JSON = "mcore_bridge.json"


class Commands(TyperGroup):
    """The commands. Wrong usage is one message, as other errors are, with exit code 2."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        """Read the options before a command."""
        as_json = "--json" in args
        with _wrong_usage(as_json):
            context = super().make_context(info_name, args, *rest, **extra)
        context.meta[_JSON] = as_json
        return context

    def invoke(self, ctx: Any) -> Any:
        """Read the options of a command, and run it."""
        with _wrong_usage(ctx.meta[_JSON]):
            return super().invoke(ctx)


@contextlib.contextmanager
def _wrong_usage(as_json: bool) -> Iterator[None]:
    """Prints an error of typer, or of click, which some releases of typer have inside."""
    try:
        yield
    except Exception as error:
        if not hasattr(error, "format_message") or type(error).__name__ == "NoArgsIsHelpError":
            raise
        message = printable(_usage_message(error))
        _print_error(message, sys.stdout if as_json else None)
        raise typer.Exit(2) from None


def _print_error(message: str, stdout: TextIO | None) -> None:
    """Print a message to stderr, and also as an object for scripts if ``stdout`` is given."""
    typer.secho(f"error: {message}", fg="red", err=True)
    if stdout is not None:
        print(json.dumps({"error": message}), file=stdout)


def _usage_message(error: Any) -> str:
    """An error of typer as a message of ours: what was expected, what was found, and where all is explained.

    Newer releases of typer leave out the value, which is then in the error of pydantic behind it.
    """
    context, option = getattr(error, "ctx", None), getattr(error, "param", None)
    what = error.format_message().rstrip(".")
    if option is not None and type(error).__name__ == "MissingParameter":
        what = f"expected {option.name.upper()}, found nothing: {(option.help or '').rstrip('.')}"
    elif option is not None:
        reasons: list[Any] = getattr(error.__cause__, "errors", list)()
        reason = error.message.rstrip(".").replace("Input should be", "must be").partition(", unable")[0]
        value = f", found {reasons[0]['input']!r}" if reasons else ""
        name = option.opts[0] if option.param_type_name == "option" else option.name.upper()
        what = f"{name} {reason}{value}"
    elif hasattr(error, "possibilities"):
        near = get_close_matches(error.option_name, _names_in(context), n=1)
        what = f"there is no option {error.option_name}{f', do you mean {near[0]}?' if near else ''}"
    path = context.command_path if context is not None else "mcore-bridge"
    return f"{what}; {path} --help shows what it takes"


def _names_in(context: Any) -> list[str]:
    """The options of the command that was called."""
    return [] if context is None else [name for option in context.command.params for name in option.opts]


@contextlib.contextmanager
def running(context: typer.Context) -> Iterator[Answer]:
    """Yields the function that prints the answer of a command. An error is one message, and exit code 1, or 2 if the
    command line cannot be read.

    With ``--debug`` the error has its traceback. With ``--json`` stdout has one object and nothing else, of an error
    ``{"error": "..."}``.
    """
    as_json, stdout = bool(context.params.get("json")), sys.stdout
    levels = {logger: logger.level for logger in map(logging.getLogger, _NOISY)}
    for logger in levels:
        logger.setLevel(logging.ERROR)

    def answer(value: Any, report: Callable[[Any], RenderableType]) -> None:
        if as_json:
            print(json.dumps(plain(value), allow_nan=False), file=stdout)
        else:
            shown = report(value)
            Console(highlight=False).print(shown, soft_wrap=isinstance(shown, Text))  # a text is made to be copied

    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr if as_json else stdout):
            warnings.simplefilter("ignore")
            yield answer
    except typer.Exit:
        raise
    except Exception as error:
        of_engine = isinstance(error.__cause__ if isinstance(error, UsageError) else error, TargetError)
        message = in_options(describe(error), options_of(context), of_engine=of_engine)
        _print_error(message, stdout if as_json else None)
        if context.params.get("debug"):
            typer.echo(getattr(error, "details", "") or traceback.format_exc(), err=True)
        elif not isinstance(error, BridgeError) or hasattr(error, "details"):
            typer.echo("(--debug shows more)", err=True)
        raise typer.Exit(2 if isinstance(error, UsageError) else 1) from None
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def plain(value: Any) -> Any:
    """An answer as values for JSON.

    A dataclass is an object of its fields and properties. Fields that ``repr`` hides are for the report alone. A mesh
    has the sizes for which there are options. A number that is not finite is null; paths and dtypes are text.
    """
    from mcore_bridge.config.mesh.parallel_dims import ParallelDims

    if isinstance(value, ParallelDims):
        return {name: getattr(value, name) for name in MESH}
    if is_dataclass(value):
        return {name: plain(getattr(value, name)) for name in keys_of(type(value))}
    if isinstance(value, Mapping):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    return list(map(plain, value)) if isinstance(value, Sequence) else str(value).removeprefix("torch.")


def keys_of(answer: type) -> list[str]:
    """The keys of a dataclass in JSON. docs/tools/command_page.py describes them by the dataclass's docstring."""
    computed = [name for name, member in vars(answer).items() if isinstance(member, property)]
    return computed + [field.name for field in fields(answer) if field.repr]


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Turns ``torch.compile`` off inside. megatron-core's modules call it, and it would import all of inductor."""
    name = "TORCHDYNAMO_DISABLE"
    given = os.environ.get(name)
    os.environ[name] = given or "1"
    try:
        yield
    finally:
        if given is None:
            del os.environ[name]


def given_options(context: typer.Context) -> frozenset[str]:
    """The names of the options and arguments that the command line has."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return frozenset(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")


def refuse(context: typer.Context, names: Collection[str], why: str) -> None:
    """Refuse options of which this run makes no use.

    Args:
        names: the options, as parameters of Python.
        why: why they have no effect, such as "without --gpus".

    Raises:
        UsageError: the command line has some of them.
    """
    if ignored := sorted(given_options(context).intersection(names)):
        named = ", ".join(f"--{name.replace('_', '-')}" for name in ignored)
        raise UsageError(f"{named} would have no effect {why}: leave out what is not needed")


def options_of(context: typer.Context) -> list[str]:
    """The names of a command's options, as parameters of Python."""
    return [str(option.name) for option in context.command.params if option.param_type_name == "option"]


def in_options(message: str, parameters: Collection[str], *, of_engine: bool = False) -> str:
    """A message of the library in which the options of a command replace arguments of Python.

    Only names change. Advice for which a command has no option is in ``BridgeError.in_python``, and not in the message.

    Args:
        message: the message of the library.
        parameters: names of the command's options. Other names stay as they are.
        of_engine: whether the message is about the sizes of an engine.

    Example:
        >>> in_options('tp=3 must divide 8: use layout="balanced" or sp=True', ["tp", "layout", "sp"])
        '--tp 3 must divide 8: use --layout balanced or --sp'
    """
    options = {name: name for name in parameters} | {name: to for name, to in _OPTION_OF.items() if to in parameters}
    for name, parameter in options.items():
        option = "--" + ("engine-" * (of_engine and name in _AXES)) + parameter.replace("_", "-")
        is_word = name not in _AXES | _OPTION_OF.keys()  # then only its place shows that an argument is meant
        bare = r"(?= must | needs | [\"'])" if is_word else r"\b(?![-_(=])"
        start = rf"(?<![-\w./\"']){name}"  # not in a word, a path or a quotation, and no option yet
        message = re.sub(rf"\b(?:pass|set) {name}=False\b", f"leave out {option}", message)
        message = re.sub(rf"{start}=True\b", option, message)
        message = re.sub(rf"{start}=([\"']?)([\w.]+)\1", rf"{option} \2", message)
        message = re.sub(f"{start}{bare}", option, message)
    return message
