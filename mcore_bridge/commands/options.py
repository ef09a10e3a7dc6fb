"""Options that several commands share, and their values. It imports nothing heavy, so that ``--help`` is fast."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcore_bridge.arguments import FORMER_VALUES, given_path
from mcore_bridge.errors import BridgeError, ConfigError

if TYPE_CHECKING:
    import torch

    from mcore_bridge.config.mesh.parallel_dims import ParallelDims
    from mcore_bridge.factory.blueprint import BuildOptions

MESH = ("tp", "pp", "vp", "cp", "ep", "etp", "sp", "layout")
"""The options of a mesh, as fields of ``ParallelDims``."""
DTYPE = '{}: float32, bfloat16 or float16. Without it, or with "auto": {}.'
"""The help of every ``--dtype``."""
VISIONS = ("text_only", "train", "frozen")
_CHOICES = {
    "device": ("cpu", "cuda"),
    "backend": ("auto", "te", "torch"),
    "model": ("gpt", "hybrid"),
    "vision": VISIONS,
}
"""Options of a build that have few values."""
NODE = 8
"""GPUs of a node, by default."""
BANDWIDTH = 255.0
"""GB/s that a rank receives from others, measured with exports of 16 and 61 GB among 4 H200s by NVLink."""


class UsageError(ConfigError):
    """The command line cannot be read. A command then exits with 2."""


@contextmanager
def of_command_line() -> Iterator[None]:
    """Errors inside come from the command line alone, so they are wrong usage."""
    try:
        yield
    except BridgeError as error:
        raise UsageError(str(error)) from error


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one step on one replica.

    Attributes:
        sequence: tokens of a sequence.
        micro_batch: sequences of a microbatch.
        recompute: keep only the input of each layer, and compute all else again in the backward pass.
    """

    sequence: int
    micro_batch: int
    recompute: bool = False


def path(text: str) -> Path:
    """Parse a path of the command line. An empty one is refused, unlike "."."""
    try:
        return given_path(text)
    except BridgeError as error:
        raise typer.BadParameter(str(error)) from error


# fmt: off
Folder = Annotated[Path, typer.Argument(
    parser=path, help="Folder of the HF checkpoint, or its name on the hub.", show_default=False)]
Tp     = Annotated[int,  typer.Option(min=1, help="Tensor parallel size.")]
Pp     = Annotated[int,  typer.Option(min=1, help="Pipeline parallel size.")]
Vp     = Annotated[int,  typer.Option(min=1, help="Virtual stages (chunks) of each pipeline rank.")]
Cp     = Annotated[int,  typer.Option(min=1, help="Context parallel size.")]
Ep     = Annotated[int,  typer.Option(min=1, help="Expert parallel size.")]
Etp    = Annotated[int,  typer.Option(min=1, help="Tensor parallel size of the experts.")]
Mtp    = Annotated[int,  typer.Option(min=0, help="Number of MTP layers (multi-token prediction) to build.")]
Vision = Annotated[str,  typer.Option(
    help='A composite\'s models of images: "train" or "frozen" with them, "text_only" without.')]
Model  = Annotated[str,  typer.Option(
    help='The class of megatron-core to build: "gpt", or "hybrid" (HybridModel, since 0.19).')]
Sp     = Annotated[bool, typer.Option("--sp", help="Sequence parallelism; needs --tp above 1.")]
Layout = Annotated[str | None, typer.Option(
    help='"balanced": layers split by bytes; or an explicit layout of megatron-core, such as "Ett|tttL".')]
Strict = Annotated[bool, typer.Option("--strict-config", help="Also refuse unknown fields that change nothing.")]
Download = Annotated[bool, typer.Option(
    "--download", help="Download what is named on the hub. Without this option only the local hub cache is read.")]
Json   = Annotated[bool, typer.Option("--json", help="Print one JSON object, also of an error, and nothing else.")]
Debug  = Annotated[bool, typer.Option("--debug", help="Show tracebacks and the output of the ranks.")]
# fmt: on


def finite(value: float) -> float:
    """The value of an option, for its ``callback``. ``min=`` lets NaN and infinity pass."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"must be a finite number, found {value}: pass such a number")
    return value


def one_of(option: str, value: str, choices: tuple[str, ...]) -> str:
    """The value of an option that has only these choices, or had it in the release before.

    Raises:
        UsageError: it is another value.
    """
    if value not in (*choices, *FORMER_VALUES.get(option, ())):
        raise UsageError(f"--{option} must be one of {', '.join(choices)}, found {value!r}: pass one of them")
    return value


def mesh_of(context: typer.Context) -> ParallelDims:
    """The mesh of a command's options. Sizes that the command lacks are 1."""
    from mcore_bridge.config.mesh.parallel_dims import ParallelDims

    with of_command_line():
        return ParallelDims(**{name: context.params[name] for name in MESH if name in context.params})


def build_options(context: typer.Context) -> BuildOptions:
    """The options of a command that describe the model to build. Options that the command lacks have their defaults."""
    from mcore_bridge.factory.blueprint import BuildOptions

    given = context.params
    chosen: dict[str, Any] = {
        name: one_of(name, given[name], values) for name, values in _CHOICES.items() if name in given
    }
    if "strict_config" in given:
        chosen["strict_config"] = given["strict_config"]
    return BuildOptions(dims=mesh_of(context), overrides={"mtp_num_layers": given["mtp"] or None}, **chosen)


def dtype_of(name: str | None) -> torch.dtype | None:
    """The dtype that the option ``--dtype`` names, if it is given and not "auto"."""
    from mcore_bridge.config.transformer import BUILDABLE
    from mcore_bridge.rules.dtypes import AUTO, as_dtype, dtype_name

    return None if name is None else as_dtype(one_of("dtype", name, (*map(dtype_name, BUILDABLE), AUTO)))
