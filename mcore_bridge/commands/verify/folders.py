"""``mcore-bridge verify --files-only``: compares two HF folders tensor by tensor, and builds no model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mcore_bridge.commands import text
from mcore_bridge.rules.encoded import Encoded
from mcore_bridge.weights.manifest import Manifest, ManifestEntry, digest
from mcore_bridge.weights.progress import Report, show_progress, tracked
from mcore_bridge.weights.source.source import open_folder


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
        first, second = (_manifest_of(*pair) for pair in ((folder, "first"), (against, "second")))
    return FolderComparison(folder, against, len(first), first.num_bytes, first.differences(second))


def render(compared: FolderComparison) -> str:
    """The report, as a line."""
    held = f"{text.plural(compared.tensors, 'tensor')}, {text.num_bytes(compared.bytes)}"
    if compared.good:
        return f"[green]equal[/]: {compared.folder} and {compared.against} have {held}, bit by bit"
    number, names = text.plural(len(compared.different), "tensor"), text.names(compared.different)
    return f"[red]DIFFERENT[/]: {number} of {compared.folder} ({held}) and {compared.against}: {names}"


def _manifest_of(folder: Path, phase: str) -> Manifest:
    import torch

    source = open_folder(folder)
    names, entries = [*source], []
    for name, tensor in tracked(source.pairs(names), phase, names.__len__):
        plain = tensor.to(torch.bfloat16) if isinstance(tensor, Encoded) else tensor
        entries.append(ManifestEntry(name, tuple(plain.shape), plain.dtype, digest(plain)))
    return Manifest(tuple(entries))
