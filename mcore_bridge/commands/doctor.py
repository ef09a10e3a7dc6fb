"""``mcore-bridge doctor``: what is installed, whether it was tested together, and whether the import name is ours."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.version import InvalidVersion, Version

DISTRIBUTION = "mcore-hf"
PACKAGE = "mcore_bridge"

MINIMUM = {"python": "3.11", "torch": "2.6", "megatron-core": "0.16.1", "transformers": "4.57"}
"""What we can run with at all, as our distribution declares it."""

TESTED = {
    "python": ("3.11", "3.12"),
    "torch": ("2.13", "2.13"),
    "megatron-core": ("0.16.1", "0.19.2"),
    "transformers": ("4.57", "5.23"),
}
"""The oldest and the newest release that the whole suite is run with."""

_REQUIRED = ("torch", "megatron-core", "transformers", "accelerate", "einops", "safetensors")
_OPTIONAL = {"transformer-engine": 'backend "te" on GPUs', "triton": "megatron-core 0.19", "rich": "", "typer": ""}


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that was looked at. ``advice`` says what to do; with ``is_problem`` nothing will work before that."""

    name: str
    found: str
    advice: str = ""
    is_problem: bool = False


def examine() -> list[Line]:
    """All that there is to say about this environment."""
    return [_python(), *map(_required, _REQUIRED), *_optional(), _triton(), *_gpus(), *_clash(), _self()]


def _python() -> Line:
    return _judged("python", platform.python_version())


def _required(name: str) -> Line:
    found = _version(name)
    if found is None:
        return Line(name, "missing", f"install it: pip install {name}", is_problem=True)
    return _judged(name, found)


def _judged(name: str, found: str) -> Line:
    """A version against what is needed and what was tested."""
    if name not in TESTED:
        return Line(name, found)
    oldest, newest = TESTED[name]
    try:
        version = Version(found)
    except InvalidVersion:
        return Line(name, found, f"no version that can be compared; tested: {oldest} to {newest}")
    if version < Version(MINIMUM[name]):
        return Line(name, found, f"too old: at least {MINIMUM[name]} is needed", is_problem=True)
    newest_release = Version(newest).release
    if version >= Version(oldest) and version.release[: len(newest_release)] <= newest_release:
        return Line(name, found)
    return Line(name, found, f"not tested ({oldest} to {newest} are): run mcore-bridge verify before you rely on it")


def _optional() -> list[Line]:
    lines = []
    for name, purpose in _OPTIONAL.items():
        found = _version(name)
        lines.append(Line(name, found or "not installed", f"only for {purpose}" if purpose and not found else ""))
    return lines


def _triton() -> Line:
    """megatron-core 0.19 imports triton, which a CPU build of torch does not bring."""
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
        return [Line("GPUs", "none", 'device="cpu" and the backend "torch" work')]
    count = torch.cuda.device_count()
    line = Line("GPUs", f"{count} x {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}")
    if _version("transformer-engine") is None:
        return [line, Line("backend", "torch", "for speed: pip install 'mcore-hf[te]'")]
    return [line]


def _clash() -> list[Line]:
    """Other distributions that install the package ``mcore_bridge``: whichever came last has overwritten the other."""
    lines = []
    for other in others(metadata.distributions()):
        advice = (
            f"{other.name} also imports as {PACKAGE}, and one has overwritten files of the other: "
            f"pip uninstall {other.name} {DISTRIBUTION}, then pip install {DISTRIBUTION} (or keep only the other)"
        )
        lines.append(Line("name clash", f"{other.name} {other.version}", advice, is_problem=True))
    return lines


def others(distributions: Iterable[metadata.Distribution]) -> list[metadata.Distribution]:
    """Those that provide the package ``mcore_bridge`` and are not ours, each once."""
    found = {each.name: each for each in distributions if each.name and _normal(each.name) != DISTRIBUTION}
    return [each for each in found.values() if _provides(each)]


def _provides(distribution: metadata.Distribution) -> bool:
    top_level = (distribution.read_text("top_level.txt") or "").split()
    files = distribution.files or []
    return PACKAGE in top_level or any(file.parts[0] == PACKAGE for file in files)


def _self() -> Line:
    """Whether the package that runs is that of our distribution, and not a copy that shadows it."""
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
