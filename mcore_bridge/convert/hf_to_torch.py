"""Converts an HF folder to Megatron's ``torch`` format, which has one file for each place on a mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.convert.assemble import specs_of
from mcore_bridge.convert.conversion import ModelConversion, Progress, read_source
from mcore_bridge.convert.rank_files.file import NAME, RELEASE, write_rank_file
from mcore_bridge.convert.rank_files.file_layout import FileLayout, RankFile, Style
from mcore_bridge.errors import MeshError
from mcore_bridge.factory.param_count import resolve_layout
from mcore_bridge.weights.dist_checkpoint.folder import TRACKER
from mcore_bridge.weights.source.source import Source, open_folder

_STYLES = {"te": Style(grouped=True), "torch": Style(fused_norms=False, extra_state=None)}
"""The names of parameters with the modules of each backend."""


@dataclass(frozen=True, slots=True)
class RankFiles:
    """Settings of files in Megatron's ``torch`` format: the mesh, and the kind of model that will load them."""

    dims: ParallelDims
    style: Style


def rank_files(to: str, dims: ParallelDims, backend: str) -> RankFiles | None:
    """The settings from options of the command; None for another format.

    Raises:
        MeshError: the options have a mesh, and the format has none.
    """
    if to == "torch":
        return RankFiles(dims, _STYLES[backend])
    if dims != ParallelDims():
        raise MeshError(f"{to} loads at any mesh, found {dims}: leave the mesh out, or write files for it: --to torch")
    return None


@dataclass(frozen=True, kw_only=True)
class ToTorch(ModelConversion):
    """The conversion of an HF folder to the files of one mesh."""

    kind = "torch"
    heads = (TRACKER,)
    layout: FileLayout

    @classmethod
    def plan(cls, source: Path, staging: Path, hf: Path, wanted: RankFiles, *, dtype: torch.dtype | None) -> ToTorch:
        """Plan the conversion, and compare the folder with its config."""
        model, ignored = read_source(source, hf, dtype=dtype)
        dims = resolve_layout(wanted.dims, model.provenance.hf, dtype=model.entries[0].held.dtype)
        layout = FileLayout(hf, dims, {spec.name: spec for spec in specs_of(model.entries)}, wanted.style)
        numbers = {entry.held.name: number for number, entry in enumerate(model.entries)}
        units = tuple(
            tuple(numbers[mcore] for _, _, mcore, _ in layout.held(file) if mcore in numbers) for file in layout.files()
        )
        return cls(model=model, source=source, staging=staging, units=units, ignored=ignored, layout=layout)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the files, one for each place on the mesh."""
        return tuple(f"{RELEASE}/{file.name}/{NAME}" for file in self._files)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the parameters in each file."""
        return tuple(map(self.layout.num_bytes, self._files))

    @property
    def options(self) -> object:
        """The mesh, and the kind of model, as JSON."""
        return [dataclasses.asdict(self.layout.dims), dataclasses.asdict(self.layout.style)]

    def write(self, number: int, progress: Progress) -> None:
        """Write one file, one parameter after the other."""
        with self.completing(number) as path:
            write_rank_file(path, self.layout, self._files[number], self._checkpoint, self.device, progress)

    def replaced(self, target: Path) -> Iterable[str]:
        """The names of the files of a checkpoint of this kind in ``target``."""
        return [str(path.relative_to(target)) for path in target.glob(f"{RELEASE}/mp_rank_*/{NAME}")]

    def finish(self) -> None:
        """Write the tracker file, the HF config and the tokenizer."""
        super().finish()
        (self.staging / TRACKER).write_text(RELEASE)

    @cached_property
    def _files(self) -> tuple[RankFile, ...]:
        return tuple(self.layout.files())

    @cached_property
    def _checkpoint(self) -> Source:
        return open_folder(self.source, self.model.mapping)
