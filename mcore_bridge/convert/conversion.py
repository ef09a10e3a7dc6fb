"""The base class of all conversions, and the assignment of parameters to the files that are written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain, groupby
from pathlib import Path
from typing import Any, ClassVar

import torch

from mcore_bridge.config.hf import dtype_in
from mcore_bridge.convert.assemble import check_source, parts_of
from mcore_bridge.convert.reference_model import WholeModel, whole_model
from mcore_bridge.rules.encoded import Encoded
from mcore_bridge.rules.spec import TensorSpec, runs_within
from mcore_bridge.weights.files.sidecars import copy_companions
from mcore_bridge.weights.plan.inventory import ParamEntry
from mcore_bridge.weights.provenance import config_in, head_of, write_config
from mcore_bridge.weights.source.source import open_folder

Unit = tuple[int, ...]
"""The numbers of the parameters that are in one file."""
Progress = Callable[[int], None]
"""A function that is called with the number of further bytes that were written."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A conversion to numbered files, each of which any process can write. It can be pickled.

    Attributes:
        source: the folder that is read.
        staging: the folder that is written.
        units: the parameters, or tensors, of each file.
        ignored: HF names that no parameter uses.
        device: where parameters are assembled and disassembled: "cpu", or "cuda" for the current GPU of the process.
    """

    kind: ClassVar[str]
    heads: ClassVar[Sequence[str]]
    """Files that every reader requires in the target."""

    source: Path
    staging: Path
    units: tuple[Unit, ...]
    ignored: tuple[str, ...] = ()
    device: str = "cpu"

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: files that this process has opened, and all that was read from them, stay here."""
        return {own.name: getattr(self, own.name) for own in fields(self)}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the files. A file gets its name when it is complete."""
        raise NotImplementedError

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the tensors in each file."""
        raise NotImplementedError

    @property
    def contents(self) -> Iterable[object]:
        """The inputs of the files, besides the source. Objects with equal ``repr`` make equal files."""
        raise NotImplementedError

    @property
    def numels(self) -> Sequence[int]:
        """The number of parameters in each tensor of the target. Scales have none."""
        raise NotImplementedError

    @property
    def options(self) -> object:
        """Further settings on which the target depends, beside the source, the units and the parameters, as JSON."""
        return None

    @property
    def copied_names(self) -> tuple[str, ...]:
        """HF names in the target of parts for which no model was built."""
        return ()

    @property
    def note(self) -> str:
        """A message about the target for users; empty if there is none."""
        return ""

    @contextlib.contextmanager
    def completing(self, number: int) -> Iterator[Path]:
        """The path at which to write a file. At the end the file is on the disk and gets its name."""
        path, whole = self.staging / f"{number}.partial", self.staging / self.names[number]
        path.unlink(missing_ok=True)
        yield path
        with path.open("rb") as file:
            os.fsync(file.fileno())  # so that a crash cannot leave the name without the data
        whole.parent.mkdir(parents=True, exist_ok=True)
        path.rename(whole)

    def write(self, number: int, progress: Progress) -> None:
        """Write one file, and call ``progress`` with the bytes of each parameter."""
        raise NotImplementedError

    def replaced(self, target: Path) -> Iterable[str]:
        """The names of the files of a checkpoint of this kind in ``target``."""
        raise NotImplementedError

    def finish(self) -> None:
        """Write the files of the target that have no tensors."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ModelConversion(Conversion):
    """A conversion between a model's HF tensors and its parameters."""

    model: WholeModel

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the tensors in each file."""
        return tuple(sum(self.model.entries[number].held.num_bytes for number in unit) for unit in self.units)

    @property
    def contents(self) -> Iterable[object]:
        """See ``Conversion``. Shapes alone do not show the sizes of heads, so the HF config is among them."""
        yield from zip(self.model.entries, self.model.placed, strict=True)
        yield self.model.provenance.hf.to_json_string(use_diff=False)

    @property
    def numels(self) -> Sequence[int]:
        """See ``Conversion``."""
        return [entry.held.numel for entry in self.model.entries]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights in the config of the target."""
        return max(self.model.entries, key=lambda entry: entry.held.num_bytes).held.dtype

    @property
    def hf_names(self) -> Collection[str] | None:
        """The names of all HF tensors in the target. None: it has no HF tensors."""
        return None

    def finish(self) -> None:
        """Write the files of the target that have no tensors."""
        head = self.model.provenance.lm_head
        tied = all(head not in entry.hf for entry in self.model.entries)
        write_config(config_in(self.model.provenance, self.dtype, tied=tied, names=self.hf_names), self.staging)
        copy_companions(self.model.provenance.folder, self.staging)


def read_source(
    source: Path, hf: Path, *, dtype: torch.dtype | None, num_mtp_layers: int = 0, vision: str = "text_only"
) -> tuple[WholeModel, tuple[str, ...]]:
    """Read an HF folder to convert: its model, and the names in the folder that no parameter uses.

    Raises:
        CheckpointError: the folder does not fit its config.
    """
    stored = open_folder(source)
    is_encoded = any(isinstance(tensor, Encoded) for tensor in stored.values())
    own = decoded_dtype(hf) if is_encoded else widespread((t.dtype, t.nbytes) for t in stored.values())
    model = whole_model(
        hf,
        dtype=dtype or own,
        num_mtp_layers=num_mtp_layers,
        names=stored,
        vision=vision,
        head=head_of(hf, stored),
    )
    return model, check_source(model.entries, stored.for_model(model.mapping), model.mapping, dtype=dtype)


def decoded_dtype(folder: Path) -> torch.dtype:
    """The dtype in which encoded weights are decoded: of the config if it is a float of 16 or 32 bits, else bf16."""
    own = dtype_in(folder)
    return own if own in (torch.float16, torch.float32) else torch.bfloat16


def widespread(sizes: Iterable[tuple[torch.dtype, int]]) -> torch.dtype:
    """The floating dtype of most bytes, given dtypes and bytes of tensors."""
    totals: dict[torch.dtype, int] = {}
    for dtype, size in sizes:
        if dtype.is_floating_point:
            totals[dtype] = totals.get(dtype, 0) + size
    return max(totals, key=totals.__getitem__, default=torch.bfloat16)


def units_of_tensors(specs: Sequence[TensorSpec], file_bytes: int) -> tuple[Unit, ...]:
    """Runs of HF tensors of at most ``file_bytes``, one for each file."""
    return tuple(map(tuple, runs_within(range(len(specs)), lambda number: specs[number].num_bytes, file_bytes)))


def units_of(entries: Sequence[ParamEntry], file_bytes: int) -> Iterator[Unit]:
    """Yield runs of parameters of at most ``file_bytes``, one for each file. Parts of one HF tensor stay together."""

    def size(numbers: Sequence[int]) -> int:
        return sum(entries[number].held.num_bytes for number in numbers)

    alike = groupby(range(len(entries)), lambda number: parts_of(entries[number])[0].name)
    for run in runs_within((tuple(numbers) for _, numbers in alike), size, file_bytes):
        yield tuple(chain.from_iterable(run))
