"""``mcore-bridge verify --files-only``: compares two HF folders tensor by tensor, and builds no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_bridge.commands import text
from mcore_bridge.rules.dtypes import Dtypes, wanted_dtype
from mcore_bridge.weights.manifest import Manifest, ManifestEntry, digest
from mcore_bridge.weights.progress import Report, show_progress, tracked
from mcore_bridge.weights.source.source import Source, open_folder


@dataclass(frozen=True, slots=True)
class FolderComparison:
    """The comparison of two folders.

    Attributes:
        folder: the first folder.
        against: the folder that it is compared with.
        tensors: the number of tensors in the first folder.
        bytes: their bytes; of encoded tensors, after decoding to bfloat16.
        different: names that only one folder has, or whose shapes, dtypes or bits differ.
    """

    folder: Path
    against: Path
    tensors: int
    bytes: int
    different: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Whether the comparison has found no difference."""
        return not self.different


def compare_folders(folder: Path, against: Path, report: Report) -> FolderComparison:
    """Compare all tensors of two folders. Encoded weights are decoded to bfloat16.

    Raises:
        CheckpointError: a folder cannot be read.
        ConfigError: a folder has weights in a format that is not supported.
    """
    with show_progress(report):
        opened = {"first": open_folder(folder), "second": open_folder(against)}
        first, second = (Manifest(entries_of(source, [*source], None, phase)) for phase, source in opened.items())
    return FolderComparison(folder, against, len(first), first.num_bytes, first.differences(second))


def render(compared: FolderComparison) -> str:
    """The report, as a line."""
    held = f"{text.plural(compared.tensors, 'tensor')}, {text.num_bytes(compared.bytes)}"
    if compared.good:
        return f"[green]equal[/]: {compared.folder} and {compared.against} have {held}, bit by bit"
    number, names = text.plural(len(compared.different), "tensor"), text.names(compared.different)
    return f"[red]DIFFERENT[/]: {number} of {compared.folder} ({held}) and {compared.against}: {names}"


def entries_of(source: Source, names: Sequence[str], crossing: Dtypes, phase: str) -> tuple[ManifestEntry, ...]:
    """Specs and digests of tensors of a folder, cast as an export casts. Encoded weights are decoded.

    Raises:
        CheckpointError: a file was changed after it was opened.
    """
    entries = []
    for name, tensor in tracked(source.pairs(names), phase, names.__len__):
        wanted = tensor.to(wanted_dtype(name, tensor.dtype, crossing))
        entries.append(ManifestEntry(name, tuple(wanted.shape), wanted.dtype, digest(wanted)))
    source.require_unchanged()
    return tuple(entries)
