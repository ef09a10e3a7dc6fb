"""Manifests: the names, shapes and dtypes that an export yields, known before any weight is sent.

They may include digests. A digest is the SHA-256 of a tensor's bytes (row-major, little-endian). Digests can be
compared between a live model, a file, and the tensors that an engine received.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mcore_bridge.arguments import FLAG, accepts_former_names, problem_of
from mcore_bridge.config.quantization import Quantize
from mcore_bridge.errors import ExportError, TransferError
from mcore_bridge.foreign_files import parse
from mcore_bridge.rules.dtypes import Dtypes, dtype_name
from mcore_bridge.rules.mapping import ExpertFormat
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.agreement import agree_on_plan
from mcore_bridge.weights.export import iter_hf_weights
from mcore_bridge.weights.files.hf_folder import Checkpoint
from mcore_bridge.weights.files.positional_io import array_of
from mcore_bridge.weights.model_chunks import Models
from mcore_bridge.weights.plan.engine_map import EngineMap
from mcore_bridge.weights.plan.target import Target
from mcore_bridge.weights.provenance import HF
from mcore_bridge.weights.transfer.failures import raise_on_all


@dataclass(frozen=True, slots=True)
class ManifestEntry(TensorSpec):
    """One HF tensor of an export, with its digest on request."""

    sha256: str | None = None
    """The SHA-256 of its bytes in hexadecimal digits; None if no digests were asked for."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """All HF tensors of a model, in the order in which an export yields them.

    Example:
        >>> before = mb.manifest(models, digests=True)
        >>> before.differences(mb.manifest(models, digests=True))
        ()
    """

    tensors: tuple[ManifestEntry, ...]
    """One entry for each HF tensor. A loop over the manifest is a loop over them."""
    target: str = ""
    """The digest of the engine map, if the target is one; empty for all other targets."""

    def __iter__(self) -> Iterator[ManifestEntry]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.num_bytes for spec in self.tensors)

    def with_tensors(self, specs: Iterable[TensorSpec]) -> Manifest:
        """A copy with further tensors behind these, without digests."""
        return replace(self, tensors=(*self.tensors, *(ManifestEntry(s.name, s.shape, s.dtype) for s in specs)))

    def differences(self, other: Manifest) -> tuple[str, ...]:
        """Names that only one manifest has, or whose shape, dtype or digest differ; the order does not count."""
        mine, theirs = ({spec.name: spec for spec in manifest} for manifest in (self, other))
        return tuple(name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name))

    def to_json(self) -> str:
        """The manifest as JSON: a list of ``{"name", "shape", "dtype", "sha256"}``."""
        rows = [
            {"name": spec.name, "shape": spec.shape, "dtype": dtype_name(spec.dtype), "sha256": spec.sha256}
            for spec in self.tensors
        ]
        return json.dumps(rows, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read what ``to_json`` wrote.

        Raises:
            TransferError: it is something else.
        """
        try:
            rows = parse(text.encode())
            if not isinstance(rows, list):
                raise ValueError("no list")
            return cls(tuple(map(_entry, rows)))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise TransferError(
                f"expected JSON that Manifest.to_json has written, found other text ({error!r:.200}); write it again"
            ) from None

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str], *, digests: bool = False) -> Manifest:
        """The manifest of a folder of safetensors. With ``digests``, every byte is read."""
        checkpoint, entries = Checkpoint(folder), []
        for name, tensor in checkpoint.items():
            sha256 = digest(tensor) if digests else None
            entries.append(ManifestEntry(name, tuple(tensor.shape), tensor.dtype, sha256))
            checkpoint.files[name].release(name)
        checkpoint.require_unchanged()
        return cls(tuple(entries))


def _entry(row: dict[str, Any]) -> ManifestEntry:
    name, shape, dtype, sha256 = row["name"], tuple(row["shape"]), getattr(torch, row["dtype"]), row["sha256"]
    is_shape = all(type(size) is int and size >= 0 for size in shape)
    if not (isinstance(name, str) and is_shape and isinstance(dtype, torch.dtype) and isinstance(sha256, str | None)):
        raise ValueError(f"{row} is no tensor")
    return ManifestEntry(name, shape, dtype, sha256)


def digest(tensor: Tensor) -> str:
    """The SHA-256 of a tensor's bytes, as hexadecimal digits."""
    return hashlib.sha256(array_of(tensor.detach().cpu().contiguous()).data).hexdigest()


@accepts_former_names
def manifest(
    models: Models,
    *,
    hf: HF | None = None,
    head: str = "lm",
    dtype: Dtypes = None,
    expert_format: ExpertFormat | None = None,
    digests: bool = False,
    bucket_bytes: int | None = None,
    target: Target = "everything",
    merged: bool | None = None,
    quantize: Quantize = None,
) -> Manifest:
    """The manifest of an ``iter_hf_weights`` with these arguments. All ranks of a replica call it together.

    Without digests no weight is sent. With digests the model is exported once; if all ranks get everything, they share
    the hashing.

    Args:
        digests: whether to compute the SHA-256 of each tensor.
        models, hf, head, dtype, expert_format, bucket_bytes, target, merged, quantize: as for ``iter_hf_weights``.

    Returns:
        Name, shape and dtype of each HF tensor in the order of the export, with digests on request.

    Raises:
        ExportError, MappingError, TargetError: as ``iter_hf_weights``.

    Example:
        >>> mb.manifest(models).num_bytes                 # of all tensors that an export yields
        666048
    """
    options: dict[str, Any] = {
        "expert_format": expert_format,
        "bucket_bytes": bucket_bytes,
        "target": target,
        "merged": merged,
        "quantize": quantize,
    }
    shared = {"digests": digests, "dtype": dtype} if digests else {}  # other ranks have cast these tensors
    if problem := problem_of(digests=(digests, FLAG)):
        options["target"] = ExportError(problem)
    export = agree_on_plan(models, hf, head, **options, dtype=dtype, shared=shared)
    specs = tuple(
        ManifestEntry(spec.name, spec.shape, export.format.wanted_dtype(spec.name, spec.dtype, dtype))
        for spec in export.program.plan.tensors()
    )
    of_map = target.digest if isinstance(target, EngineMap) else ""
    if not digests:
        return Manifest(specs, of_map)
    pairs = iter_hf_weights(models, hf=hf, head=head, dtype=dtype, **options)
    size, rank = (export.group.size, export.group.rank) if export.program.is_gather else (1, 0)
    own: dict[str, str] = {}
    with (
        raise_on_all(export.group, kind=ExportError),  # such as out of memory
        closing(pairs),  # type: ignore[type-var]  # a generator, as it promises
    ):
        own = {name: digest(tensor) for i, (name, tensor) in enumerate(pairs) if i % size == rank}
    parts = export.group.all_gather_object(own) if export.program.is_gather else [own]
    by_name = {name: value for part in parts for name, value in part.items()}
    return Manifest(tuple(replace(spec, sha256=by_name[spec.name]) for spec in specs), of_map)
