"""A model as the ``WeightSource`` of vLLM's own backends of weight transfer, of vLLM 0.33 or newer.

Each backend wants HF tensors at other ranks of the trainer. It may want them whole on rank 0, whole on every rank, or
each whole on any one rank. Or it wants them cut over all ranks, as ``torch.chunk`` cuts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from mcore_bridge.arguments import Kind, accepts_former_names, require
from mcore_bridge.config.mesh.alike import Shared, agreed
from mcore_bridge.config.quantization import Quantize
from mcore_bridge.errors import TransferError
from mcore_bridge.rules.mapping import ExpertFormat
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.sync.routes import of_model
from mcore_bridge.weights.bound import BoundModel, bind
from mcore_bridge.weights.export import SliceOrigin, iter_hf_weights, origins_of
from mcore_bridge.weights.manifest import manifest
from mcore_bridge.weights.model_chunks import Models
from mcore_bridge.weights.plan.boxes import BoxCopy
from mcore_bridge.weights.plan.engine_map import EngineMap, EngineTensor, SliceCopy
from mcore_bridge.weights.plan.target import Target
from mcore_bridge.weights.transfer.collectives import Group
from mcore_bridge.weights.transfer.endpoints import check_storage

Backend = Literal["nccl", "ipc", "sharded_rdt", "nccl_m2n"]
"""The name of a weight transfer backend of vLLM."""
Box = tuple[range, ...]
"""The indices of an HF tensor that a rank holds, along each dim."""
Boxes = Sequence[Mapping[str, Box | None]]
"""For each rank, the box of each HF tensor of which it has a part; None if its parts are no box."""


@dataclass(frozen=True)
class Replicated:
    """vLLM's ``Replicate``, where vLLM is not installed."""


@dataclass(frozen=True)
class Shard:
    """vLLM's ``Shard``, where vLLM is not installed."""

    dim: int


@dataclass(frozen=True)
class ParamMeta:
    """vLLM's ``ParamMeta``, where vLLM is not installed."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = field(default=None, kw_only=True)
    mesh_shape: tuple[int, ...] | None = field(default=None, kw_only=True)
    placements: tuple[Any, ...] | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class _Distribution:
    """Where an HF tensor lies: its owners (None is every rank), and how it is cut over them."""

    owners: tuple[int, ...] | None = None
    mesh: tuple[int, ...] | None = None
    dims: tuple[int | None, ...] | None = None
    """For each axis of ``mesh``, the dim that it cuts."""
    is_gathered: bool = True
    """Whether owners get it from other ranks."""


class VllmSource:
    """What vLLM calls a ``WeightSource``. Use ``vllm_source`` to make one."""

    def __init__(
        self,
        models: Models,
        tensors: Mapping[TensorSpec, _Distribution],
        rank: int,
        whole: Target,
        options: Mapping[str, Any],
    ) -> None:
        """Keep what each pass needs.

        Args:
            models: this rank's chunks.
            tensors: the layout of each HF tensor, in the order of the metadata.
            rank: this rank in the trainer.
            whole: what an export yields on this rank to give it the tensors that it owns, whole.
            options: further arguments of ``iter_hf_weights``.
        """
        self._models, self._rank, self._options = models, rank, options
        self._is_gathered = {spec.name: layout.is_gathered for spec, layout in tensors.items()}
        self._whole = whole
        self._rest = whole if all(self._is_gathered.values()) else _only(self._is_gathered, [*tensors])
        types = _types()
        self.metadata: list[Any] = [
            types.ParamMeta(
                spec.name,
                spec.dtype,
                tuple(spec.shape),
                owners=layout.owners,
                mesh_shape=layout.mesh,
                placements=layout.dims
                and tuple(types.Replicate() if dim is None else types.Shard(dim) for dim in layout.dims),
            )
            for spec, layout in tensors.items()
        ]
        """Name, dtype, shape and place of each HF tensor, equal on every rank."""

    def owned_names(self, rank: int) -> list[str]:
        """The HF tensors that a rank yields, in the order of the metadata."""
        return [meta.name for meta in self.metadata if meta.owners is None or rank in meta.owners]

    def implements_iter_full(self) -> bool:
        """True, for any backend."""
        return True

    def implements_iter_local(self) -> bool:
        """True, for any backend."""
        return True

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each HF tensor that this rank owns, whole. All ranks iterate together, to the end.

        Raises:
            ExportError: as ``iter_hf_weights``.
        """
        return self._gathered(self.owned_names(self._rank), self._whole)

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's part of each HF tensor that it owns. All ranks iterate together, to the end.

        Raises:
            ExportError: as ``iter_hf_weights``.
        """
        owned = self.owned_names(self._rank)
        pairs = self._gathered([name for name in owned if self._is_gathered[name]], self._rest)
        first = next(pairs, None)  # all parameters are up to date from here on
        bound = bind(self._models, **of_model(self._options))
        check_storage(bound.tensors)
        origins = _by_name(bound)
        for name in owned:
            if not self._is_gathered[name]:
                yield name, _joined(origins[name], bound)
            elif first is not None:
                yield first
                first = next(pairs, None)
        for _ in pairs:
            pass

    def _gathered(self, names: Sequence[str], target: Target) -> Iterator[tuple[str, Tensor]]:
        """Yield these HF tensors, which the target selects, whole and in this order."""
        export: Any = iter_hf_weights(self._models, target=target, **self._options)
        early: dict[str, Tensor] = {}
        with closing(export) as pairs:
            for name in names:
                while name not in early:
                    other, tensor = next(pairs)
                    early[other] = tensor
                yield name, early.pop(name)
            for _ in pairs:
                pass


@accepts_former_names
def vllm_source(
    models: Models,
    backend: Backend,
    *,
    expert_format: ExpertFormat | None = None,
    merged: bool | None = None,
    quantize: Quantize = None,
) -> VllmSource:
    """A model as the source of weights of vLLM's own backends. All ranks of the trainer call this together.

    ``WeightSync`` needs none of these backends. This function is for trainers that use them already.

    Args:
        models: this rank's chunks, wrapped or not.
        backend: the backend of vLLM. ``"nccl"``: rank 0 gets whole tensors. ``"ipc"``: each rank gets them.
            ``"sharded_rdt"``: each tensor is whole on one rank of each replica. ``"nccl_m2n"``: ranks yield their own
            parts wherever all ranks cut a tensor evenly along one dim, and whole tensors otherwise.
        expert_format, merged, quantize: as for ``iter_hf_weights``. Codes and scales leave whole with every backend.

    Returns:
        The source, to pass to vLLM's trainer.

    Raises:
        TransferError: on every rank, when ``backend`` is none of these, or arguments differ between ranks.
        ExportError, MappingError: as ``iter_hf_weights``.

    Example:
        >>> source = mb.vllm_source(models, "nccl")
        >>> # TrainerWeightTransferEngine.trainer_init(init_info, client=client, source=source)
        >>> [meta.name for meta in source.metadata][-1]
        'lm_head.weight'
        >>> dict(source.iter_full()).keys() == mb.to_hf_state_dict(models).keys()
        True
    """
    options: dict[str, Any] = {"expert_format": expert_format, "merged": merged, "quantize": quantize}

    def checked() -> tuple[dict[str, Box | None], Shared]:
        require(TransferError, backend=(backend, _BACKEND))
        held = _by_name(bind(models, **of_model(options))) if quantize is None else {}  # codes are made anew
        return {name: _box_of(origins) for name, origins in held.items()}, {"backend": backend, **options}

    group = Group.of_trainer()
    try:
        own = agreed([group.group], checked, TransferError)  # type: ignore[list-item]  # there is a world
        specs: Sequence[TensorSpec] = tuple(manifest(models, **options))
        if backend == "sharded_rdt":
            specs = _by_layer(specs)
            own = dict.fromkeys(spec.name for spec in manifest(models, target="share", **options))
        boxes, rank = group.all_gather_object(own), group.rank
    finally:
        group.close()
    tensors = dict(zip(specs, _LAYOUTS[backend](specs, boxes), strict=True))
    whole: Target = "share" if backend == "sharded_rdt" else "everything"
    return VllmSource(models, tensors, rank, "nothing" if backend == "nccl" and rank else whole, options)


# where a backend wants HF tensors -------------------------------------------------------------------------------------


def _on_rank_0(specs: Sequence[TensorSpec], boxes: Boxes) -> list[_Distribution]:
    return [_Distribution((0,))] * len(specs)


def _on_all(specs: Sequence[TensorSpec], boxes: Boxes) -> list[_Distribution]:
    return [_Distribution()] * len(specs)


def _shared(specs: Sequence[TensorSpec], boxes: Boxes) -> list[_Distribution]:
    owners = [tuple(rank for rank, of_rank in enumerate(boxes) if spec.name in of_rank) for spec in specs]
    return [_Distribution(of_spec) for of_spec in owners]


def _as_held(specs: Sequence[TensorSpec], boxes: Boxes) -> list[_Distribution]:
    return [_cut(tuple(spec.shape), [of_rank.get(spec.name) for of_rank in boxes]) for spec in specs]


def _cut(shape: tuple[int, ...], boxes: Sequence[Box | None]) -> _Distribution:
    """How all ranks cut a tensor. If no mesh of two axes says it, every rank gets the whole tensor."""
    size, everyone = len(boxes), tuple(range(len(boxes)))
    if None in boxes:
        return _Distribution()
    held = [box for box in boxes if box is not None]
    dims = [dim for dim, length in enumerate(shape) if any(len(box[dim]) < length for box in held)]
    if not dims:
        return _Distribution(is_gathered=False)
    (dim, *others), number = dims, len(set(held))
    if others or shape[dim] % number or size % number:
        return _Distribution()
    length, repeats = shape[dim] // number, size // number
    if any(len(box[dim]) != length or box[dim].start % length for box in held):
        return _Distribution()
    places = [box[dim].start // length for box in held]
    if places == [rank % number for rank in everyone]:
        return _Distribution(everyone, (repeats, number), (None, dim), is_gathered=False)
    if places == [rank // repeats for rank in everyone]:
        return _Distribution(everyone, (number, repeats), (dim, None), is_gathered=False)
    return _Distribution()


_LAYOUTS: dict[str, Callable[[Sequence[TensorSpec], Boxes], list[_Distribution]]] = {
    "nccl": _on_rank_0,
    "ipc": _on_all,
    "sharded_rdt": _shared,
    "nccl_m2n": _as_held,
}
_BACKEND = Kind(
    f"one of {', '.join(_LAYOUTS)}",
    lambda value: isinstance(value, str) and value in _LAYOUTS,
    "pass one of them",
)


def _by_layer(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """In vLLM's groups: what precedes the first layer, the layers of each stack, and the rest."""
    keys = [_layer_of(spec.name) for spec in specs]
    first = next((place for place, key in enumerate(keys) if key is not None), 0)
    stacks = {key[0]: number for number, key in reversed(list(enumerate(keys))) if key is not None}
    places = {
        spec.name: (1, stacks[key[0]], key[1]) if key is not None else (0 if place < first else 2, 0, 0)
        for place, (spec, key) in enumerate(zip(specs, keys, strict=True))
    }
    return sorted(specs, key=lambda spec: places[spec.name])


def _layer_of(name: str) -> tuple[str, int] | None:
    parts = name.split(".")
    at = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    return None if at is None else (".".join(parts[:at]), int(parts[at]))


# what this rank holds -------------------------------------------------------------------------------------------------


def _by_name(bound: BoundModel) -> dict[str, list[SliceOrigin]]:
    origins: dict[str, list[SliceOrigin]] = {}
    for origin in origins_of(bound):
        origins.setdefault(origin.name, []).append(origin)
    return origins


def _box_of(origins: Sequence[SliceOrigin]) -> Box | None:
    """The indices that slices cover together; None if these are no box."""
    shape = origins[0].shape
    parts = [[range(size)[index] for size, index in zip(shape, origin.index, strict=True)] for origin in origins]
    box = tuple(_union([part[dim] for part in parts]) for dim in range(len(shape)))
    return box if sum(map(_size, parts)) == _size(box) else None


def _union(ranges: Sequence[range]) -> range:
    return range(min(part[0] for part in ranges), max(part[-1] for part in ranges) + 1)


def _size(box: Sequence[range] | None) -> int:
    return 0 if not box else math.prod(map(len, box))


def _joined(origins: Sequence[SliceOrigin], bound: BoundModel) -> Tensor:
    """The box of some slices, as a new tensor."""
    box = _box_of(origins)
    assert box is not None
    joined: Tensor | None = None
    for origin in origins:
        part = origin.of(bound.exported(origin.mcore))
        if joined is None:
            joined = torch.empty([len(along) for along in box], dtype=part.dtype, device=part.device)
        joined[tuple(_shifted(index, along) for index, along in zip(origin.index, box, strict=True))] = part
    assert joined is not None
    return joined


def _shifted(index: slice, along: range) -> slice:
    if index.start is None:
        return index
    return slice(index.start - along.start, index.stop - along.start, index.step)


def _only(is_wanted: Mapping[str, bool], specs: Sequence[TensorSpec]) -> Target:
    """What an export yields on a rank that gets some HF tensors whole, and no others."""
    tensors, copies = [], []
    for spec in specs:
        if is_wanted[spec.name]:
            shape = tuple(spec.shape)
            strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
            tensors.append(EngineTensor(spec.name, shape, strides, spec.dtype))
            copies.append(SliceCopy(spec.name, spec.name, BoxCopy.of(0, shape, strides, 0, strides)))
    return EngineMap("whole HF tensors", tuple(specs), tuple(tensors), tuple(copies)) if copies else "nothing"


def _types() -> Any:
    """vLLM's classes, or ours in their place."""
    try:
        from vllm.distributed.weight_transfer import base
    except ImportError:
        base = None
    if hasattr(base, "Shard"):
        return base
    return SimpleNamespace(ParamMeta=ParamMeta, Shard=Shard, Replicate=Replicated)
