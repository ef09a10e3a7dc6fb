"""Exports weights from mcore to HF: agree on a plan, run it, and yield HF tensors. Saves and trainers use this
iterator.

Nothing communicates until the first ``next``. ``iter_hf_shards`` never communicates: it yields the slices that a rank
holds, for callers that transfer weights themselves.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from mcore_bridge.arguments import DEVICE, FLAG, accepts_former_names, problem_of
from mcore_bridge.config.quantization import Quantize
from mcore_bridge.rules.dtypes import Dtypes, has_overflown, warn_of_overflow
from mcore_bridge.rules.mapping import ExpertFormat, unstacked
from mcore_bridge.rules.trace import Copy, Shape
from mcore_bridge.weights.agreement import Export, Only, open_export, unless
from mcore_bridge.weights.bound import BoundModel, bind, provenance_on
from mcore_bridge.weights.model_chunks import Models, groups_of
from mcore_bridge.weights.param_sync import require_gathered
from mcore_bridge.weights.plan.target import Target
from mcore_bridge.weights.progress import tracked
from mcore_bridge.weights.provenance import HF
from mcore_bridge.weights.source.weight_format import PLAIN, WeightFormat
from mcore_bridge.weights.transfer.collectives import Group
from mcore_bridge.weights.transfer.endpoints import check_storage
from mcore_bridge.weights.transfer.executor import run_program


@accepts_former_names
def iter_hf_weights(
    models: Models,
    *,
    hf: HF | None = None,
    head: str = "lm",
    dtype: Dtypes = None,
    device: torch.device | str | None = None,
    expert_format: ExpertFormat | None = None,
    bucket_bytes: int | None = None,
    target: Target = "everything",
    copy: bool = True,
    merged: bool | None = None,
    quantize: Quantize = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every HF tensor, whole, with equal names, order and bits on every rank; or what ``target`` selects.

    All ranks of a model replica (tensor, expert and pipeline ranks) iterate together, also ranks that get nothing.
    Replicas are independent, unless megatron-core's DDP has ``overlap_param_gather``. In this case all replicas must
    begin together. Parameters that a step left for the next forward are gathered first. If one replica cannot begin,
    all raise.

    Tensors are detached copies that the caller may keep, unless ``copy`` is False. After the first ``next`` a rank may
    stop early: it closes the generator or drops it. ``close`` returns after the rank has sent what other ranks still
    need.

    Args:
        models: this rank's chunks, wrapped or not; parameters may be on CPU while the group is NCCL.
        hf, head: deprecated; call ``adopt`` once for models that ``build_model`` did not make.
        dtype: cast tensors to this; by default each tensor keeps its own dtype.
        device: where tensors are yielded; by default where the group communicates.
        expert_format: "split" yields one tensor for each routed expert, "fused" one tensor for all experts of a layer.
            None means the format of the checkpoint that the model came from.
        bucket_bytes: limits the messages in flight to a rank. An export takes at most three times this memory, beside
            the model and the largest tensor (or the tensors of a layer that engines fuse). If this is not enough,
            pipeline stages send one after the other, and experts a few at a time. None means 2 GB in all, or 1.5 times
            the largest tensor. With buckets below 512 MB, add the part of the tensor before that the caller still
            holds, and a few KB for each rank. ``mcore-bridge plan`` shows the figure.
        target: the part of the export that this rank gets; other ranks may choose differently. "everything"; "nothing",
            so that it only sends; "share"; or an ``EngineRank``, to get only its slices (``mb.engine_ranks`` makes all
            ranks of an engine). With "share", each HF tensor is whole on exactly one of the ranks that share, with
            about equally many bytes on each. With an ``EngineMap``, this rank gets the slices that the map copies, and
            no other HF tensor.
        copy: False yields tensors that arrive whole, such as most experts, as views of received memory. A view is valid
            until the next step of the iterator, and must not be written. This takes less memory, but delays the next
            message.
        merged: required for models with adapters. True yields weights with merged adapters, summed in fp64 and rounded
            once. False yields the base alone. The models do not change. A rank holds only a few merged shards at a
            time.
        quantize: None yields plain tensors. "as_published" yields what the folder of the model has: codes and scales of
            encoded weights under its names, and all other tensors in its dtypes. A folder of another release of this
            model gives its format instead, and a ``quantization_config`` (a dict as in config.json) a new one. Ranks
            encode their own shards, so codes travel. ``dtype`` applies to plain tensors. A rank's codes for three
            messages take further memory. See docs/guide/quantized.md.

    Yields:
        HF names, each with its tensor in the shape of the HF checkpoint, or the slice that ``target`` selects.

    Raises:
        ExportError: on every rank of the group, when any of them fails. The error names the rank and the parameter.
        MappingError: on every rank of the group, when the ranks together do not hold a whole model.
        TargetError: on every rank of the group, when the model cannot be cut for the target of some rank.

    Example:
        >>> for name, tensor in mb.iter_hf_weights(models):
        ...     if "layers" not in name:
        ...         print(name, tuple(tensor.shape))
        model.embed_tokens.weight (96, 48)
        model.norm.weight (48,)
        lm_head.weight (96, 48)
    """
    options: dict[str, Any] = {
        "expert_format": expert_format,
        "bucket_bytes": bucket_bytes,
        "target": unless(problem_of(device=(device, DEVICE.or_none()), copy=(copy, FLAG)), target),
        "merged": merged,
        "quantize": quantize,
    }
    yield from _pairs(open_export(models, hf, head, **options, dtype=dtype), dtype, device, copy=copy)


def iter_with_sources(
    models: Models,
    *,
    part: Mapping[str, Tensor] | None,
    rows: Sequence[int] | None,
    device: torch.device | str | None = None,
    merged: bool | None = None,
    problem: str = "",
) -> Iterator[tuple[str, Tensor, tuple[str, ...]]]:
    """Yield HF tensors like ``iter_hf_weights``, each with the canonical names of the parameters that become it.

    Args:
        models, device, merged: as for ``iter_hf_weights``.
        part: tensors of this rank by canonical name, to export only these, in place of the tensors of the models;
            None exports all.
        rows: what the ranks chose, equal on all ranks. If it is empty on all ranks, nothing is yielded.
        problem: why this rank cannot export, so that all ranks raise; "" if it can.

    Raises:
        ExportError, MappingError: as ``iter_hf_weights``, except that layers may be absent from a part. A tensor of
            all experts must be there with all its experts.
    """
    if rows is not None and not Group.of_replica(groups_of(models)).max(len(rows)):
        return
    chosen: Any = {"only": Only(tensors=part), "shared": {"conversion_tasks": rows}}
    export = open_export(models, None, "lm", merged=merged, target=unless(problem, "everything"), **chosen)
    sources: dict[str, list[str]] = {}
    for entry in export.program.plan.payload.entries:
        for name in (*entry.hf, *entry.copies):
            sources.setdefault(unstacked(name)[0], []).append(entry.held.name)
    with closing(_pairs(export, None, device, copy=True)) as pairs:
        for name, tensor in pairs:
            yield name, tensor, tuple(sources[name])


def _pairs(
    export: Export, dtype: Dtypes, device: torch.device | str | None, *, copy: bool
) -> Generator[tuple[str, Tensor]]:
    """Run an export. Where the caller stops early, this rank still sends what other ranks need."""
    with closing(run_program(export.program, export.group, export.held, lend=not copy)) as pairs:
        count = lambda: sum(1 for _ in export.program.plan.tensors())  # noqa: E731
        yield from tracked(converted(pairs, dtype, device, export.format), "export", count)


def converted(
    pairs: Generator[tuple[str, Tensor]],
    dtype: Dtypes,
    device: torch.device | str | None,
    form: WeightFormat = PLAIN,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the pairs of an export in another dtype, or on another device. Codes and scales keep their dtype."""
    if dtype is None and device is None and form.source is None:
        yield from pairs
        return
    infinite: list[str] = []
    for name, tensor in pairs:
        try:
            wanted = form.wanted_dtype(name, tensor.dtype, dtype)
            new = tensor if device is None and wanted == tensor.dtype else tensor.to(device or tensor.device, wanted)
            infinite += [name] * (wanted != tensor.dtype and has_overflown(new))
        except Exception as problem:  # such as out of memory: the export fails on every rank
            pairs.throw(problem)
        yield name, new
    warn_of_overflow(infinite)


@accepts_former_names
def to_hf_state_dict(
    models: Models,
    *,
    hf: HF | None = None,
    head: str = "lm",
    dtype: Dtypes = None,
    device: torch.device | str | None = None,
    expert_format: ExpertFormat | None = None,
    bucket_bytes: int | None = None,
    target: Target = "everything",
    merged: bool | None = None,
    quantize: Quantize = None,
) -> dict[str, Tensor]:
    """The whole HF state dict on every rank, or what ``target`` selects: all pairs of ``iter_hf_weights``.

    Args:
        models, hf, head, dtype, device, expert_format, bucket_bytes, target, merged, quantize: as for
            ``iter_hf_weights``.

    Returns:
        Tensors by HF name, in the order of the export. Each has the shape of the HF checkpoint, or of the slice
        that ``target`` selects.

    Raises:
        ExportError, MappingError, TargetError: as ``iter_hf_weights``.

    Example:
        >>> state = mb.to_hf_state_dict(models)           # names and shapes of published files
        >>> len(state), state["model.norm.weight"].dtype
        (47, torch.float32)
    """
    options: dict[str, Any] = {
        "expert_format": expert_format,
        "bucket_bytes": bucket_bytes,
        "target": target,
        "merged": merged,
        "quantize": quantize,
    }
    return dict(iter_hf_weights(models, hf=hf, head=head, dtype=dtype, device=device, **options))


@dataclass(frozen=True, slots=True)
class LocalSlice:
    """A slice of an HF tensor: ``whole[index] == tensor``.

    Attributes:
        name: the name of the HF tensor.
        shape: its whole shape.
        index: the place of the slice in it, one ``slice`` for each dim.
        tensor: a view of the live parameter, in the orientation of HF. It changes with the parameter, is not always
            contiguous, and must not be written. With a merged adapter, it is a view of a new tensor.
    """

    name: str
    shape: Shape
    index: tuple[slice, ...]
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class SliceOrigin:
    """The part of the parameter ``mcore`` that is the slice ``index`` of the HF tensor ``name`` of ``shape``."""

    name: str
    shape: Shape
    index: tuple[slice, ...]
    mcore: str
    copy: Copy
    is_stacked: bool
    """Whether the HF tensor has a leading dim for experts, which the slice lacks."""

    def of(self, parameter: Tensor) -> Tensor:
        """The slice as a view of the parameter, in the orientation of HF."""
        held = self.copy.of_shard(parameter.detach())
        part = held if self.copy.view is None else (~self.copy.view)((held,), {})[0]
        return part[None] if self.is_stacked else part


@accepts_former_names
def iter_hf_shards(
    models: Models,
    *,
    hf: HF | None = None,
    head: str = "lm",
    expert_format: ExpertFormat | None = None,
    merged: bool | None = None,
) -> Iterator[LocalSlice]:
    """Yield the slices of HF tensors that this rank holds. Nothing is copied and nothing communicates.

    The slices of all ranks of a model replica make up every HF tensor. If several ranks hold a slice, each rank yields
    it. A parameter gives as few slices as its layout allows: one, or one for each group of heads that q, k and v share.
    Slices are plain, since a scale may need numbers of several ranks: ``iter_hf_weights`` has ``quantize=``.

    Args:
        models: this rank's chunks, wrapped or not.
        hf, head: deprecated; call ``adopt`` once for models that ``build_model`` did not make.
        expert_format: how HF names the experts, as for ``iter_hf_weights``.
        merged: whether adapters are merged, as for ``iter_hf_weights``.

    Yields:
        Each slice with the name and the whole shape of its HF tensor, and its place there.

    Raises:
        MappingError: when the provenance of models is unknown, or a parameter has no rule.
        ExportError: when a parameter has no storage. With ``overlap_param_gather``, also before the first forward, and
            when the next forward may still have to gather parameters.

    Example:
        >>> for shard in mb.iter_hf_shards(models):
        ...     if shard.name == "lm_head.weight":
        ...         print(shard.index, tuple(shard.tensor.shape))
        (slice(0, 96, 1), slice(None, None, None)) (96, 48)
    """
    require_gathered(models)
    bound = bind(models, provenance_on(models, hf, head), expert_format=expert_format, merged=merged)
    check_storage(bound.tensors)
    for mcore, origins in groupby(origins_of(bound), key=attrgetter("mcore")):
        held = bound.exported(mcore)
        for origin in origins:
            yield LocalSlice(origin.name, origin.shape, origin.index, origin.of(held))


def origins_of(bound: BoundModel) -> Iterator[SliceOrigin]:
    """Yield the origins of all slices that a rank holds, parameter by parameter."""
    for mcore in bound.tensors:
        binding = bound.mapping.bind(mcore)
        if not binding.exported:  # another parameter has this HF tensor
            continue
        traced = bound.trace(binding)
        for copy in traced.to_mcore:
            if copy.shard == bound.ranks[binding.axis]:
                for name in (binding.hf[copy.part], *(binding.copies if copy.part == 0 else ())):
                    yield _origin(name, traced.part_shapes[copy.part], copy, mcore, bound.axes["experts"])


def _origin(name: str, shape: Shape, copy: Copy, mcore: str, num_experts: int) -> SliceOrigin:
    index = [slice(None)] * len(shape)
    stop = copy.part_start + (copy.size - 1) * copy.part_step + 1
    index[copy.part_dim] = slice(copy.part_start, stop, copy.part_step)
    whole, number = unstacked(name)
    if number is None:
        return SliceOrigin(name, shape, tuple(index), mcore, copy, is_stacked=False)
    return SliceOrigin(whole, (num_experts, *shape), (slice(number, number + 1), *index), mcore, copy, is_stacked=True)
