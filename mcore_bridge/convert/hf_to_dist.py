"""Converts an HF folder to a ``torch_dist`` folder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mcore_bridge.convert.assemble import assemble
from mcore_bridge.convert.conversion import ModelConversion, Progress, read_source, units_of
from mcore_bridge.weights.dist_checkpoint.files import LocatedParam, file_name, finish, plan_files, write_file
from mcore_bridge.weights.dist_checkpoint.folder import HEADS, dist_files
from mcore_bridge.weights.source.source import Source, open_folder

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan


@dataclass(frozen=True, kw_only=True)
class ToDist(ModelConversion):
    """The conversion of an HF folder to a ``torch_dist`` folder."""

    kind = "torch_dist"
    heads = HEADS

    @classmethod
    def plan(
        cls,
        source: Path,
        staging: Path,
        hf: Path,
        *,
        dtype: torch.dtype | None,
        num_mtp_layers: int,
        vision: str,
        file_bytes: int,
    ) -> ToDist:
        """Plan the conversion, and compare the folder with its config."""
        model, ignored = read_source(source, hf, dtype=dtype, num_mtp_layers=num_mtp_layers, vision=vision)
        units = tuple(units_of(model.entries, file_bytes))
        return cls(model=model, source=source, staging=staging, units=units, ignored=ignored)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the files: one for each unit, and one for objects that are no tensors."""
        return tuple(map(file_name, range(len(self.units) + 1)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the tensors in each file."""
        return (*super().sizes, 0)

    def write(self, number: int, progress: Progress) -> None:
        """Write one file. Each parameter is assembled when torch requests it."""
        plans, _ = self._plans

        def make(number: int) -> Tensor:
            entry = self.model.entries[number]
            progress(entry.held.num_bytes)
            return assemble(entry, self._checkpoint, self.device)

        write_file(self.staging, number, plans[number], self._placed(number), make)

    def replaced(self, target: Path) -> Iterable[str]:
        """The names of the files of a checkpoint of this kind in ``target``."""
        return dist_files(target)

    def finish(self) -> None:
        """Write the metadata of the folder, the HF config and the tokenizer."""
        super().finish()
        _, metadata = self._plans
        finish(self.staging, len(self.names), metadata)

    @cached_property
    def _checkpoint(self) -> Source:
        return open_folder(self.source, self.model.mapping)

    @cached_property
    def _plans(self) -> tuple[list[SavePlan], Metadata]:
        return plan_files(map(self._placed, range(len(self.units))), self.model.objects)

    def _placed(self, number: int) -> list[LocatedParam]:
        return [self.model.placed[param] for param in self.units[number]] if number < len(self.units) else []
