"""``mcore-bridge doctor``: installed versions, whether they were tested together, and clashes of the package name."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.version import InvalidVersion, Version
from rich.console import Group
from rich.markup import escape
from rich.table import Table

DISTRIBUTION = "mcore-hf"
PACKAGE = "mcore_bridge"

MINIMUM = {"python": "3.11", "torch": "2.6", "megatron-core": "0.16.1", "transformers": "4.57"}
"""The oldest versions that work, as our distribution declares them."""

TESTED = {
    "python": ("3.11", "3.13"),
    "torch": ("2.13", "2.13"),
    "megatron-core": ("0.16.1", "0.19.2"),
    "transformers": ("4.57", "5.24"),
}
"""The oldest and the newest release with which the whole suite runs; on Python 3.13 its quick tests do."""

_REQUIRED = ("torch", "megatron-core", "transformers", "accelerate", "einops", "safetensors")
_OPTIONAL = {
    "transformer-engine": ('backend "te" on GPUs', "'mcore-hf[te]'"),
    "triton": ("megatron-core 0.19", "triton"),
    "peft": ("logits of verify --adapter", "'mcore-hf[peft]'"),
    "rich": ("commands", "'mcore-hf[cli]'"),
    "typer": ("commands", "'mcore-hf[cli]'"),
}
"""Packages without which something lacks, each with its purpose and what to install."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the report.

    Attributes:
        name: the package or setting that was checked.
        state: its version or value.
        advice: the change that is needed; it may be empty.
        is_problem: whether nothing works without this change.
    """

    name: str
    state: str
    advice: str = ""
    is_problem: bool = False


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of an examination of the environment.

    Attributes:
        lines: the lines of the report.
    """

    lines: tuple[Line, ...]

    @property
    def ready(self) -> bool:
        """Whether no change is needed."""
        return not any(line.is_problem for line in self.lines)

    @property
    def conclusion(self) -> str:
        """The last line of the report: ready, or what to do first."""
        problems = [f"{line.name}: {line.advice}" for line in self.lines if line.is_problem]
        return f"not ready: {'; '.join(problems)}" if problems else "ready"


def examine() -> Diagnosis:
    """Examine the packages of this environment."""
    python = _judged("python", platform.python_version())
    return Diagnosis(
        (python, *map(_required, _REQUIRED), *_optional(), _triton(), *_gpus(), *_formats(), *_clash(), _self())
    )


def render(diagnosis: Diagnosis) -> Group:
    """The report for people: a row for each line, then the conclusion."""
    table = Table(show_header=False, box=None, padding=(0, 1))
    for _ in range(3):
        table.add_column(overflow="fold")  # otherwise a path would be cut
    for line in diagnosis.lines:
        color = "red" if line.is_problem else "yellow" if line.advice else "green"
        table.add_row(f"[bold]{line.name}[/]", f"[{color}]{escape(line.state)}[/]", escape(line.advice))
    return Group(table, escape(diagnosis.conclusion))


def _required(name: str) -> Line:
    installed = _version(name)
    if installed is None:
        return Line(name, "missing", f"install it: pip install {name}", is_problem=True)
    return _judged(name, installed)


def _judged(name: str, installed: str) -> Line:
    """Compares a version with the oldest release that works and the newest release that was tested."""
    if name not in TESTED:
        return Line(name, installed)
    oldest, newest = TESTED[name]
    try:
        version = Version(installed)
    except InvalidVersion:
        return Line(name, installed, f"cannot be compared with the tested versions, {oldest} to {newest}")
    if version < Version(MINIMUM[name]):
        return Line(name, installed, f"too old: at least {MINIMUM[name]} is needed", is_problem=True)
    newest_release = Version(newest).release
    if version >= Version(oldest) and version.release[: len(newest_release)] <= newest_release:
        return Line(name, installed)
    tested = f"{oldest} is" if oldest == newest else f"{oldest} to {newest} are"
    return Line(name, installed, f"not tested ({tested}): run mcore-bridge verify before you rely on it")


def _optional() -> list[Line]:
    lines = []
    for name, (purpose, to_install) in _OPTIONAL.items():
        installed = _version(name)
        advice = "" if installed else f"only for {purpose}: pip install {to_install}"
        lines.append(Line(name, installed or "not installed", advice))
    return lines


def _triton() -> Line:
    """Whether megatron-core can be imported. Release 0.19 imports triton, which CPU builds of torch do not have."""
    core = _version("megatron-core") or "0"
    needed = Version(core) >= Version("0.19")
    if needed and importlib.util.find_spec("triton") is None:
        return Line("megatron-core", core, "imports triton, which is missing: pip install triton", is_problem=True)
    return Line("import megatron.core", "possible" if _version("megatron-core") else "impossible")


def _gpus() -> list[Line]:
    if _version("torch") is None:
        return []
    import torch

    if not torch.cuda.is_available():
        works = 'device="cpu" and the backend "torch" work'
        if torch.version.cuda is None:
            return [Line("GPUs", "none", works)]
        return [Line("GPUs", f"none, though torch is built for CUDA {torch.version.cuda}", f"run nvidia-smi; {works}")]
    count = torch.cuda.device_count()
    line = Line("GPUs", f"{count} x {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}")
    if _version("transformer-engine") is None:
        return [line, Line("backend", "torch", "for speed: pip install 'mcore-hf[te]'")]
    return [line]


def _formats() -> list[Line]:
    """The formats of quantized weights that this torch can make and read. All of them work on the CPU."""
    if _version("torch") is None:
        return []
    import torch

    if hasattr(torch, "float8_e8m0fnu"):
        return [Line("quantized weights", "fp8, int4, nvfp4, mxfp4")]
    return [Line("quantized weights", "fp8, int4, nvfp4, mxfp4", "scales of e8m0 need torch 2.7")]


def _clash() -> list[Line]:
    """Other distributions with a package ``mcore_bridge``. The last one that was installed overwrote files."""
    lines = []
    for other in others(metadata.distributions()):
        advice = (
            f"{other.name} also has a package {PACKAGE}, and one has overwritten files of the other: "
            f"pip uninstall {other.name} {DISTRIBUTION}, then pip install {DISTRIBUTION} (or keep only the other)"
        )
        lines.append(Line("name clash", f"{other.name} {other.version}", advice, is_problem=True))
    return lines


def others(distributions: Iterable[metadata.Distribution]) -> list[metadata.Distribution]:
    """The distributions that have a package ``mcore_bridge`` and are not ours, without repetitions."""
    by_name = {other.name: other for other in distributions if other.name and _normal(other.name) != DISTRIBUTION}
    return [other for other in by_name.values() if _provides(other)]


def _provides(distribution: metadata.Distribution) -> bool:
    top_level = (distribution.read_text("top_level.txt") or "").split()
    files = distribution.files or []
    return PACKAGE in top_level or any(file.parts[0] == PACKAGE for file in files)


def _self() -> Line:
    """A line that shows whether this distribution is installed, and the folder of the running package."""
    here = Path(__file__).parent.parent
    version = _version(DISTRIBUTION)
    if version is None:
        return Line(DISTRIBUTION, "not installed", f"running from {here}; pip install {DISTRIBUTION} to have it")
    return Line(DISTRIBUTION, f"{version} in {here}")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
