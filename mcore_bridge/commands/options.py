"""Options that several commands share, and their values. It imports nothing heavy, so that ``--help`` is fast."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mcore_bridge.arguments import given_path
from mcore_bridge.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from mcore_bridge.factory.blueprint import BuildOptions

_DTYPES = ("float32", "bfloat16", "float16", "auto")
MESH = ("tp", "pp", "vp", "cp", "ep", "etp", "sp", "layout")
"""The options of a mesh, as fields of ``ParallelDims``."""
BANDWIDTH = 255.0
"""GB/s that a rank receives from others, measured with exports of 16 and 61 GB among 4 H200s by NVLink."""


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
    """Parse a path of the command line. The shell tells an empty one, which ``running`` refuses, from "."."""
    return given_path(text) if text else Path()


# fmt: off
Folder = Annotated[Path, typer.Argument(
    parser=path, help="Folder of the HF checkpoint, or its name on the hub.", show_default=False)]
Tp     = Annotated[int,  typer.Option(help="Tensor parallel size.")]
Pp     = Annotated[int,  typer.Option(help="Pipeline parallel size.")]
Vp     = Annotated[int,  typer.Option(help="Virtual stages (chunks) of each pipeline rank.")]
Cp     = Annotated[int,  typer.Option(help="Context parallel size.")]
Ep     = Annotated[int,  typer.Option(help="Expert parallel size.")]
Etp    = Annotated[int,  typer.Option(help="Tensor parallel size of the experts.")]
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
        raise typer.BadParameter(f"must be a finite number, found {value}")
    return value


def one_of(option: str, value: str, choices: tuple[str, ...]) -> str:
    """The value of an option that has only these choices; any other raises ``ConfigError``."""
    if value not in choices:
        raise ConfigError(f"--{option} must be one of {', '.join(choices)}, found {value!r}")
    return value


def build_options(context: typer.Context) -> BuildOptions:
    """The options of a command that describe the model to build. Options that the command lacks have their defaults."""
    from mcore_bridge.config.mesh.parallel_dims import ParallelDims
    from mcore_bridge.factory.blueprint import BuildOptions

    given = context.params
    sizes = {name: given[name] for name in MESH if name in given}
    others = {name: given[name] for name in ("device", "backend", "strict_config", "vision", "model") if name in given}
    overrides = {"mtp_num_layers": given["mtp"] or None}
    return BuildOptions(dims=ParallelDims(**sizes), overrides=overrides, **others)


def dtype_of(name: str | None) -> torch.dtype | None:
    """The dtype that the option ``--dtype`` names, if it is given and not "auto"."""
    from mcore_bridge.rules.dtypes import as_dtype

    return None if name is None else as_dtype(one_of("dtype", name, _DTYPES))
