"""RLinf's resharder over our exports: one object in the place of its own, for all generations of its interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mcore_bridge.errors import BridgeError, ExportError
from mcore_bridge.trainers.rlinf.engine import Destination, Engine
from mcore_bridge.trainers.rlinf.shares import TensorSlice, slices_of
from mcore_bridge.trainers.rlinf.sync import Bucket, FullBucket, Sync
from mcore_bridge.weights.agreement import Export
from mcore_bridge.weights.bound import Models, chunks_of
from mcore_bridge.weights.model_tensors import held_tensors
from mcore_bridge.weights.plan.export_plan import ExportPlan
from mcore_bridge.weights.plan.target import EngineRank, Target
from mcore_bridge.weights.provenance import HF
from mcore_bridge.weights.transfer.collectives import Group


class MegatronCoreWeightReshard:
    """Gathers a model bucket by bucket, as the engine's rank beside this one takes it.

    Every rank of a model replica calls each method, in the same order: also those whose weights are for nobody. Tensors
    have HF's names, are contiguous and cut for the destination, and share memory with no parameter.
    Expert names are those of single experts, as SGLang and vLLM load them, whatever the checkpoint has.

    >>> reshard = MegatronCoreWeightReshard(ReshardConfig(model_type="qwen3_moe", ...), hf="path/of/model")
    >>> for bucket in reshard.divide_model_to_bucket(model):
    ...     state = reshard.gather_and_reshard_model(bucket, dst_tp_rank)

    Args:
        config: RLinf's ``ReshardConfig`` of any generation. Only what it says of the engine is read.
        hf, head: for models that ``build_model`` did not make: their HF config or folder, and their head.

    Raises:
        ConfigError: ``config`` describes no rollout engine.
    """

    def __init__(self, config: Any, *, hf: HF | None = None, head: str = "lm") -> None:
        self.config = config
        self._engine = Engine.of(config)
        self._hf, self._head = hf, head
        self._sync: Sync | None = None
        self._known: tuple[ExportPlan, dict[EngineRank, Mapping[str, TensorSlice]]] | None = None

    def set_tp_gather_is_identity(self, tp_gather_is_identity: bool) -> None:
        """Nothing: what a rank holds itself never travels."""

    def divide_model_to_bucket(self, model: Models) -> list[Bucket]:
        """Begin a sync. A collective of the replica.

        Returns:
            As many buckets on every rank, and at every step: so many that those of the rank that holds most take
            ``bucket_capacity`` bytes of its parameters each. They are gathered in order, each once.
        """
        self._end()  # which communicates, too
        chunks = chunks_of(model)
        held = sum(tensor.nbytes for tensor in held_tensors(chunks).values())
        most = Group.of_replica(chunks[0].pg_collection).max(held)
        return self._begin(model, max(-(-most // self._engine.bucket_bytes), 1))

    def gather_and_reshard_model(
        self,
        bucket_weight: Bucket | Models,
        dst_tp_rank: int | None = None,
        dst_ep_rank: int | None = None,
        dst_lm_head_rank: int | None = None,
        dst_shared_rank: int | None = None,
    ) -> dict[str, Tensor]:
        """Gather a bucket for this rank's destination; only what that lacks travels to this rank.

        Args:
            bucket_weight: of ``divide_model_to_bucket``; or a model as a whole, as RLinf had it before it had buckets.
            dst_tp_rank: the destination's place in ``reshard_tp_size``. RLinf up to 0.4.0 passes another than where it
                sends to, when the trainer's tp is above ``reshard_tp_size`` above 1: with configs that are so old it
                follows from this rank's own place instead. With others, None is that these weights are for nobody.
            dst_ep_rank, dst_lm_head_rank, dst_shared_rank: its places in expert parallelism, and, with data parallel
                attention, in what cuts the head and shared experts.

        Returns:
            What is complete with this bucket, by HF name; maybe nothing.

        Raises:
            ExportError: on every rank, when any fails; or the bucket is not the next one, or its destination is another
                than that of the first one.
            TargetError: on every rank, when the model cannot be cut for the destination of any.
        """
        bucket = bucket_weight if isinstance(bucket_weight, Bucket) else self._begin(bucket_weight, 1)[0]
        return self._gathered(bucket, Destination(dst_tp_rank, dst_ep_rank, dst_lm_head_rank, dst_shared_rank))

    def gather_full_model(self, bucket_weight: Bucket) -> FullBucket:
        """Gather a bucket whole, to be narrowed to as many destinations as this rank has, or to none.

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
        """What one destination takes of a bucket. Nothing communicates.

        Arguments are those of ``gather_and_reshard_model``. Tensors may be views of those of ``full_sd``.

        Raises:
            TargetError: the model cannot be cut for this destination.
        """
        export = full_sd.export
        destination = Destination(dst_tp_rank, dst_ep_rank, dst_lm_head_rank, dst_shared_rank)
        shares = self._shares_of(export, self._rank_at(export.bound.chunks, destination))
        return {shares[name].name: shares[name].of(t) for name, t in full_sd.tensors.items() if name in shares}

    def _target_at(self, models: Models, destination: Destination) -> Target:
        is_for_nobody = destination.dst_tp_rank is None and not self._engine.follows_trainer
        return "nothing" if is_for_nobody else self._rank_at(models, destination)

    def _rank_at(self, models: Models, destination: Destination) -> EngineRank:
        groups = chunks_of(models)[0].pg_collection
        tp, pp = ((group.size(), group.rank()) for group in (groups.tp, groups.pp))
        return self._engine.rank_at(destination, tp=tp, pp=pp)

    def _shares_of(self, export: Export, target: EngineRank) -> Mapping[str, TensorSlice]:
        """Worked out once for each plan and target."""
        plan, bound = export.program.plan, export.bound
        if self._known is None or self._known[0] is not plan:
            self._known = plan, {}
        known = self._known[1]
        if target not in known:
            num_layers = bound.chunks[0].config.num_layers
            known[target] = slices_of(target, bound.mapping, bound.axes, num_layers, plan.payload.entries)
        return known[target]

    def _begin(self, models: Models, num_buckets: int) -> list[Bucket]:
        self._end()
        self._sync = Sync(models, num_buckets, self._engine.bucket_bytes, self._hf, self._head)
        return [Bucket(self._sync, number) for number in range(num_buckets)]

    def _end(self) -> None:
        """Of the sync before: others may still wait for what this rank has of it."""
        if self._sync is not None:
            self._sync.close()
            self._sync = None

    def _gathered(self, bucket: Bucket, destination: Destination | None) -> dict[str, Tensor]:
        """The next bucket, for a destination or whole."""
        try:
            if bucket.sync is not self._sync:
                raise ExportError("expected a bucket of the last divide_model_to_bucket, found one of an earlier sync")
            return bucket.sync.gather(bucket.number, destination, self._target_at)
        except BridgeError:
            bucket.sync.close()
            raise
