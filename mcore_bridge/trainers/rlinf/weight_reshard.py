"""A class that replaces RLinf's resharder, for all generations of its interface, and that uses our exports.

It can also cut whole HF tensors to the slices of an engine's rank. This needs no communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mcore_bridge.errors import BridgeError, ExportError
from mcore_bridge.rules.mapping import ModelAxes, WeightMapping, unstacked
from mcore_bridge.trainers.rlinf.engine import Destination, Engine
from mcore_bridge.trainers.rlinf.sync import FullBucket, ReshardBucket, Sync
from mcore_bridge.weights.agreement import Export
from mcore_bridge.weights.bound import provenance_on
from mcore_bridge.weights.model_chunks import Models, chunks_of, whole_config
from mcore_bridge.weights.model_tensors import held_tensors
from mcore_bridge.weights.plan.engine_slices import Indices, Slicer, dims_of
from mcore_bridge.weights.plan.export_plan import ExportPlan
from mcore_bridge.weights.plan.inventory import ParamEntry
from mcore_bridge.weights.plan.target import EngineRank, Target
from mcore_bridge.weights.provenance import HF
from mcore_bridge.weights.transfer.collectives import Group


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """The slice of one HF tensor for a rank of an engine.

    Args:
        name: the name of the slice.
        experts: the experts of the slice, if one HF tensor has all experts of a layer; otherwise None.
        dim: the dim that is cut.
        ranges: start and end of each range of indices along ``dim``.
    """

    name: str
    experts: range | None
    dim: int
    ranges: tuple[tuple[int, int], ...]

    def of(self, whole: Tensor) -> Tensor:
        """Cut the slice from the whole tensor. It is contiguous, and a view if possible."""
        dim = self.dim
        if self.experts is not None:
            whole, dim = whole[self.experts.start : self.experts.stop], dim + 1
        parts = [whole.narrow(dim, start, end - start) for start, end in self.ranges]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim)


def slices_of(
    target: EngineRank, mapping: WeightMapping, axes: ModelAxes, num_layers: int, entries: Sequence[ParamEntry]
) -> Mapping[str, TensorSlice]:
    """The slices that an export to ``target`` would yield, by the names of the HF tensors.

    Args:
        entries: all parameters of the model, whole.

    Raises:
        TargetError: when the model cannot be cut for the target.
    """
    slicer = Slicer(target, mapping, axes, num_layers)
    experts = target.experts(axes["experts"])
    by_name: dict[str, TensorSlice] = {}
    for entry in entries:
        if (named := slicer.named(entry)) is None:
            continue
        slices = [
            TensorSlice(unstacked(name)[0], experts if entry.stack else None, dim, tuple(_ranges(taken)))
            for name, dim, taken in zip(named.hf, dims_of(entry.trace), slicer.taken(named), strict=True)
        ]
        by_name.update((unstacked(hf)[0], part) for hf, part in zip(entry.hf, slices, strict=True))
        by_name.update((name, replace(slices[0], name=name)) for name in named.copies)
    return by_name


def _ranges(indices: Indices) -> Iterator[tuple[int, int]]:
    """Yield start and end of each range of consecutive indices; one empty range if there are none."""
    for run in np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1):
        yield (int(run[0]), int(run[-1]) + 1) if len(run) else (0, 0)


class MegatronCoreWeightReshard:
    """Gathers a model bucket by bucket, cut for the rank of the engine beside this rank.

    Every rank of a model replica calls each method, in the same order, also ranks without a destination. Tensors have
    HF's names, are contiguous and cut for the destination, and share memory with no parameter. Each expert has separate
    tensors, which SGLang and vLLM load, also if the checkpoint stacks experts.

    >>> reshard = MegatronCoreWeightReshard(ReshardConfig(model_type="qwen3_moe", ...), hf="path/of/model")
    >>> for bucket in reshard.divide_model_to_bucket(model):
    ...     state = reshard.gather_and_reshard_model(bucket, dst_tp_rank)

    Args:
        config: RLinf's ``ReshardConfig`` of any generation. Only its fields for the engine are read.
        hf, head: for models that ``build_model`` did not make: their HF config or folder, and their head.
        merged: for models with adapters, as for ``iter_hf_weights``.

    Raises:
        ConfigError: ``config`` describes no rollout engine.
    """

    def __init__(self, config: Any, *, hf: HF | None = None, head: str = "lm", merged: bool | None = None) -> None:
        self.config = config
        self._engine = Engine.of(config)
        self._hf, self._head, self._merged = hf, head, merged
        self._sync: Sync | None = None
        self._known: tuple[ExportPlan, dict[EngineRank, Mapping[str, TensorSlice]]] | None = None

    def set_tp_gather_is_identity(self, tp_gather_is_identity: bool) -> None:
        """Do nothing: data that a rank holds itself never travels."""

    def divide_model_to_bucket(self, model: Models) -> list[ReshardBucket]:
        """Begin a sync. All ranks of the replica call it together.

        Returns:
            The buckets, to gather in order, each once. Their number is equal on every rank and at every step: on the
                rank with most parameters, each bucket has ``bucket_capacity`` bytes.
        """
        self._end()  # this communicates, too
        chunks = chunks_of(model)
        provenance_on(model, self._hf, self._head)  # needed for the names of another trainer's HybridModel
        held = sum(tensor.nbytes for tensor in held_tensors(chunks).values())
        most = Group.of_replica(chunks[0].pg_collection).max(held)
        return self._begin(model, max(-(-most // self._engine.bucket_bytes), 1))

    def gather_and_reshard_model(
        self,
        bucket_weight: ReshardBucket | Models,
        dst_tp_rank: int | None = None,
        dst_ep_rank: int | None = None,
        dst_lm_head_rank: int | None = None,
        dst_shared_rank: int | None = None,
    ) -> dict[str, Tensor]:
        """Gather a bucket for this rank's destination. Only what this rank lacks travels.

        Args:
            bucket_weight: a bucket of ``divide_model_to_bucket``; or a whole model, as in early releases of RLinf.
            dst_tp_rank: the destination's rank in ``reshard_tp_size``; None means that no rank gets these weights. Up
                to RLinf 0.4.0 the value may be wrong if the trainer's tp is above ``reshard_tp_size``, and that is
                above 1. With configs of that generation, it is computed from this rank's number instead.
            dst_ep_rank, dst_lm_head_rank, dst_shared_rank: the destination's ranks in expert parallelism, and, with
                data parallel attention, in the parallelism of the head and of shared experts.

        Returns:
            The tensors that are complete with this bucket, by HF name. There may be none.

        Raises:
            ExportError: on every rank, when any fails; or the bucket is not the next one, or its destination differs
                from the first bucket's.
            TargetError: on every rank, when the model cannot be cut for the destination of any rank.
        """
        bucket = bucket_weight if isinstance(bucket_weight, ReshardBucket) else self._begin(bucket_weight, 1)[0]
        return self._gathered(bucket, Destination(dst_tp_rank, dst_ep_rank, dst_lm_head_rank, dst_shared_rank))

    def gather_full_model(self, bucket_weight: ReshardBucket) -> FullBucket:
        """Gather a bucket of whole tensors, to cut for any number of destinations.

        Raises:
            ExportError: as for ``gather_and_reshard_model``.
        """
        tensors = self._gathered(bucket_weight, None)
        assert bucket_weight.sync.export is not None
        return FullBucket(bucket_weight.sync.export, tensors)

    def narrow_to_target(
        self,
        full_sd: FullBucket,
        dst_tp_rank: int,
        dst_ep_rank: int | None = None,
        dst_lm_head_rank: int | None = None,
        dst_shared_rank: int | None = None,
    ) -> dict[str, Tensor]:
        """Cut a bucket for one destination, without communication. Tensors may be views of tensors of ``full_sd``.

        Args:
            full_sd: from ``gather_full_model``.
            dst_tp_rank, dst_ep_rank, dst_lm_head_rank, dst_shared_rank: as for ``gather_and_reshard_model``.

        Raises:
            TargetError: the model cannot be cut for this destination.
        """
        export = full_sd.export
        destination = Destination(dst_tp_rank, dst_ep_rank, dst_lm_head_rank, dst_shared_rank)
        slices = self._slices_of(export, self._rank_at(export.bound.chunks, destination))
        return {slices[name].name: slices[name].of(t) for name, t in full_sd.tensors.items() if name in slices}

    def _target_at(self, models: Models, destination: Destination) -> Target:
        only_sends = destination.dst_tp_rank is None and not self._engine.follows_trainer
        return "nothing" if only_sends else self._rank_at(models, destination)

    def _rank_at(self, models: Models, destination: Destination) -> EngineRank:
        groups = chunks_of(models)[0].pg_collection
        tp, pp = ((group.size(), group.rank()) for group in (groups.tp, groups.pp))
        return self._engine.rank_at(destination, tp=tp, pp=pp)

    def _slices_of(self, export: Export, target: EngineRank) -> Mapping[str, TensorSlice]:
        """The slices of a target, computed once for each plan and target."""
        plan, bound = export.program.plan, export.bound
        if self._known is None or self._known[0] is not plan:
            self._known = plan, {}
        known = self._known[1]
        if target not in known:
            num_layers = whole_config(bound.chunks[0]).num_layers
            known[target] = slices_of(target, bound.mapping, bound.axes, num_layers, plan.payload.entries)
        return known[target]

    def _begin(self, models: Models, num_buckets: int) -> list[ReshardBucket]:
        self._end()
        self._sync = Sync(models, num_buckets, self._engine.bucket_bytes, self._hf, self._head, self._merged)
        return [ReshardBucket(self._sync, number) for number in range(num_buckets)]

    def _end(self) -> None:
        """End the last sync: other ranks may still wait for data of this rank."""
        if self._sync is not None:
            self._sync.close()
            self._sync = None

    def _gathered(self, bucket: ReshardBucket, destination: Destination | None) -> dict[str, Tensor]:
        """Gather the next bucket, for a destination or whole."""
        try:
            if bucket.sync is not self._sync:
                raise ExportError(
                    "expected a bucket of the last divide_model_to_bucket, found a bucket of an "
                    "earlier sync: gather the new buckets"
                )
            return bucket.sync.gather(bucket.number, destination, self._target_at)
        except BridgeError:
            bucket.sync.close()
            raise
