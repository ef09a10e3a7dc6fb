"""Converts a checkpoint in Megatron's ``torch`` format to an HF folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from mcore_bridge.convert.assemble import HFSlice, disassemble, specs_of
from mcore_bridge.convert.conversion import units_of, widespread
from mcore_bridge.convert.rank_files.rank_folder import RankFolder
from mcore_bridge.convert.reference_model import whole_model
from mcore_bridge.convert.to_hf import ToHF, stored_as
from mcore_bridge.errors import CheckpointError
from mcore_bridge.rules.dtypes import cast
from mcore_bridge.rules.trace import Shape
from mcore_bridge.weights.not_built import Mtp
from mcore_bridge.weights.plan.inventory import ParamEntry
from mcore_bridge.weights.provenance import head_of


@dataclass(frozen=True, kw_only=True)
class FromTorch(ToHF):
    """The conversion of the files of one mesh to an HF folder."""

    hf: Path
    """The folder of the HF config."""

    @classmethod
    def plan(
        cls, source: Path, staging: Path, hf: Path, *, dtype: torch.dtype | None, file_bytes: int, mtp: Mtp
    ) -> FromTorch:
        """Plan the conversion, and compare the files with the config."""
        folder = RankFolder.open(source, hf)
        held = {entry.held.name: entry.held for entry in folder.entries}
        own = widespread((spec.dtype, spec.num_bytes) for spec in held.values())
        head = head_of(hf, held)
        model = whole_model(hf, dtype=dtype or own, num_mtp_layers=folder.num_mtp_layers, head=head)
        _check(folder.path, _shapes(folder.entries), _shapes(model.entries))
        entries = tuple(stored_as(entry, held[entry.held.name].dtype, dtype) for entry in model.entries)
        model, units = replace(model, entries=entries), tuple(units_of(entries, file_bytes))
        return cls(model=model, source=folder.path, staging=staging, units=units, hf=hf, mtp=mtp)

    def parts(self, number: int) -> Iterator[tuple[HFSlice, Tensor]]:
        """Yield the parts of a parameter that belong to its HF tensors."""
        whole = self.model.entries[number]
        entry = self._entries[whole.held.name]
        held = whole.held
        shards = {shard: cast(held.name, own, held.dtype) for shard, own in self._folder.shards(entry).items()}
        yield from disassemble(entry, shards, self.device)
        self._folder.release(entry)

    @cached_property
    def _folder(self) -> RankFolder:
        return RankFolder.open(self.source, self.hf)

    @cached_property
    def _entries(self) -> Mapping[str, ParamEntry]:
        return {entry.held.name: entry for entry in self._folder.entries}


def _shapes(entries: Iterable[ParamEntry]) -> Mapping[str, Shape]:
    return {spec.name: spec.shape for spec in specs_of(entries)}


def _check(folder: Path, stored: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> None:
    missing, unexpected = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
    other = [name for name in wanted.keys() & stored.keys() if wanted[name] != stored[name]]
    if missing or unexpected or other:
        shapes = [f"{name}: {stored[name]}, not {wanted[name]}" for name in sorted(other)[:8]]
        raise CheckpointError(
            f"{folder} does not fit its config: it lacks parameters for the HF tensors {missing[:8]}, has unexpected "
            f"ones for {unexpected[:8]}, and other shapes for {shapes}. Pass the HF config of this model with --hf"
        )
