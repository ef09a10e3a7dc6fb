"""Translates RLinf's ``ReshardConfig``, of any generation, to targets of an export."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from mcore_bridge.errors import ConfigError, TargetError
from mcore_bridge.weights.plan.target import EngineRank

_DENSE = ("*.mlp.gate_proj.*", "*.mlp.up_proj.*", "*.mlp.gate_up_proj.*", "*.mlp.down_proj.*")
_SHARED = ("*.shared_expert.*", "*.shared_experts.*")
_LM_HEAD = ("lm_head.*", "*.lm_head.*")


class Destination(NamedTuple):
    """The rank of the engine that gets weights: its rank in each of the engine's groups, by RLinf's names."""

    dst_tp_rank: int | None = None
    dst_ep_rank: int | None = None
    dst_lm_head_rank: int | None = None
    dst_shared_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The sizes of the rollout engine.

    Attributes:
        tp, pp, ep: ``reshard_tp_size`` (for attention), ``reshard_pp_size`` and ``rollout_ep_size``.
        dense_tp, shared_tp, lm_head_tp: tensor parallelism of dense MLPs, shared experts and the head.
        has_dp_attention: whether these may differ from ``tp``.
        follows_trainer: whether the config is of the generation up to 0.4.0. Its actor passes ``rank % rollout_tp``,
            and sends to ``tp_rank // (tp // rollout_tp)``, according to its rank map.
        bucket_bytes: ``bucket_capacity``.
    """

    tp: int
    pp: int
    ep: int
    dense_tp: int
    shared_tp: int
    lm_head_tp: int
    has_dp_attention: bool
    follows_trainer: bool
    bucket_bytes: int

    @classmethod
    def of(cls, config: Any) -> Engine:
        """Read a ``ReshardConfig``, or any object with its attributes.

        Raises:
            ConfigError: the weights are not for an engine, or the config describes none.
        """
        if not hasattr(config, "reshard_tp_size"):
            raise ConfigError(
                f"expected RLinf's ReshardConfig, or an object with reshard_tp_size, found {type(config).__name__}"
            )
        if (form := getattr(config, "reshard_weights_format", "sglang")) == "mcore":
            raise ConfigError(
                f"reshard_weights_format must be one of HF names, such as 'sglang', found {form!r}: keep RLinf's own "
                "MegatronCoreWeightReshard for inference workers of Megatron"
            )
        tp = config.reshard_tp_size
        return cls(
            tp=tp,
            pp=getattr(config, "reshard_pp_size", 1),
            ep=getattr(config, "rollout_ep_size", 1),
            dense_tp=getattr(config, "rollout_moe_dense_tp_size", None) or tp,
            shared_tp=getattr(config, "rollout_full_tp_size", 1),
            lm_head_tp=getattr(config, "rollout_lm_head_tp_size", 1),
            has_dp_attention=getattr(config, "enable_dp_attention", False),
            follows_trainer=not hasattr(config, "enable_dp_attention"),
            bucket_bytes=getattr(config, "bucket_capacity", 128 << 20),
        )

    def rank_at(self, destination: Destination, *, tp: tuple[int, int], pp: tuple[int, int]) -> EngineRank:
        """The engine's rank at ``destination``.

        Args:
            tp, pp: size of the trainer's tensor and pipeline parallelism, and this rank's number in each.

        Raises:
            TargetError: the destination omits a rank that this engine needs, or does not determine the stage.
        """
        tp_rank, ep_rank = destination.dst_tp_rank, destination.dst_ep_rank
        if self.follows_trainer:
            if tp[0] % self.tp:
                raise TargetError(f"reshard_tp_size must divide the trainer's tp={tp[0]}, found {self.tp}")
            tp_rank = tp[1] // (tp[0] // self.tp)
            ep_rank = tp_rank % self.ep
        stage = self._stage(tp[0], *pp)
        ep_rank = _given("dst_ep_rank", ep_rank) if self.ep > 1 else 0
        tp_rank = _given("dst_tp_rank", tp_rank)
        cuts = self._cuts(destination, tp_rank) if self.has_dp_attention else ()
        return EngineRank(self.tp, tp_rank, self.pp, stage, self.ep, ep_rank, cuts=cuts)

    def _stage(self, tp: int, pp: int, pp_rank: int) -> int:
        """The engine's stage. RLinf sends all layers, or, if trainer and engine have equal stages, one stage's."""
        if self.pp == 1:
            return 0
        if (self.tp, self.pp) != (tp, pp):
            raise TargetError(
                f"reshard_pp_size must be 1, or both sizes must be the trainer's (tp={tp}, pp={pp}), because a call "
                f"names no stage; found tp={self.tp}, pp={self.pp}"
            )
        return pp_rank

    def _cuts(self, destination: Destination, tp_rank: int) -> tuple[tuple[str, int, int], ...]:
        shared = self.shared_tp, _given("dst_shared_rank", destination.dst_shared_rank)
        head = self.lm_head_tp, _given("dst_lm_head_rank", destination.dst_lm_head_rank)
        dense = self.dense_tp, tp_rank % self.dense_tp
        cuts = ((_DENSE, dense), (_SHARED, shared), (_LM_HEAD, head))
        return tuple((pattern, *cut) for patterns, cut in cuts for pattern in patterns)


def _given(name: str, rank: int | None) -> int:
    if rank is None:
        raise TargetError(f"{name} must be given for this engine, found None")
    return rank
