"""Targets: the part of an export that a rank gets: everything, nothing, a share, or what a rank of an engine holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mcore_bridge.arguments import COUNT, COUNTS, FLAG, NAMES, Kind, is_count, require
from mcore_bridge.errors import TargetError
from mcore_bridge.rules.mapping import matches
from mcore_bridge.weights.plan.engine_map import EngineMap

VOCAB_MULTIPLE = 64
"""vLLM and SGLang pad vocabularies to a multiple of this before they cut them."""


_CUTS = Kind(
    "triples of a pattern, a size and a rank",
    lambda value: (
        isinstance(value, tuple | list) and all(isinstance(cut, tuple | list) and len(cut) == 3 for cut in value)
    ),
    'pass a list such as [("*.q_proj.weight", 2, 0)]',
)


@dataclass(frozen=True, slots=True)
class EngineRank:
    """One rank of a rollout engine, which holds slices of HF tensors.

    An engine cuts what megatron-core cuts at the same sizes, and only between heads. With more ranks than KV heads,
    several ranks hold the same KV head. Tensors have HF's names and orientation, and nothing is padded.

    Args:
        tp, tp_rank: size of tensor parallelism, and this rank in it.
        pp, pp_rank: pipeline parallelism. The first stage has the embedding. The last stage has the final norm, the
            head, MTP layers, and also a tied embedding.
        ep, ep_rank: expert parallelism. Each rank has whole, consecutive experts; if there is a remainder, the first
            ranks have one more.
        etp, etp_rank: tensor parallelism of routed experts. By default it equals ``tp`` with ``ep=1``, and is 1
            otherwise.
        layers: decoder layers of each stage. By default as in vLLM: evenly, with the remainder on the last stages
            before the stage of the head.
        local_names: number decoder layers from 0 in each stage. In a tensor with all experts of a layer, experts always
            count from the first expert of this rank.
        whole: ``fnmatch`` patterns of the names of HF tensors that the engine does not cut.
        vocab_multiple: the engine pads vocabularies to a multiple of this before it cuts them.
        cuts: ``(pattern, size, rank)`` for HF tensors that the engine cuts differently, with patterns as in ``whole``;
            the first match counts. Engines with data parallel attention need this.

    Raises:
        TargetError: when the arguments contradict each other.

    Example:
        >>> mb.EngineRank(tp=4, tp_rank=1).padded(vocab_size=1000, tp=4)
        1024
    """

    tp: int = 1
    tp_rank: int = 0
    pp: int = 1
    pp_rank: int = 0
    ep: int = 1
    ep_rank: int = 0
    etp: int | None = None
    etp_rank: int | None = None
    layers: tuple[int, ...] | None = None
    local_names: bool = False
    whole: tuple[str, ...] = ()
    vocab_multiple: int = VOCAB_MULTIPLE
    cuts: tuple[tuple[str, int, int], ...] = ()

    def __post_init__(self) -> None:
        require(
            TargetError,
            layers=(self.layers, COUNTS.or_none()),
            whole=(self.whole, NAMES),
            cuts=(self.cuts, _CUTS),
            local_names=(self.local_names, FLAG),
            vocab_multiple=(self.vocab_multiple, COUNT),
        )
        _check_sizes(tp=self.tp, pp=self.pp, ep=self.ep, **({} if self.etp is None else {"etp": self.etp}))
        if self.etp is None and self.etp_rank is not None:
            raise TargetError(f"expected etp= beside etp_rank={self.etp_rank!r}, found none: pass both, or neither")
        for axis, size, rank in (
            ("tp", self.tp, self.tp_rank),
            ("pp", self.pp, self.pp_rank),
            ("ep", self.ep, self.ep_rank),
            ("etp", *self.experts_cut),
            *self.cuts,
        ):
            if not (isinstance(rank, int) and 0 <= rank < size):
                raise TargetError(
                    f"expected {axis} of at least 1 and {axis}_rank below it, found {size} and {rank!r}: "
                    "count ranks from 0"
                )
        if self.layers is not None and (len(self.layers) != self.pp or min(self.layers) < 0):
            raise TargetError(
                f"expected layers= with a number for each of pp={self.pp} stages, found {self.layers}: "
                "pass as many numbers as stages"
            )

    @property
    def experts_cut(self) -> tuple[int, int]:
        """Size of the tensor parallelism of routed experts, and this rank in it."""
        if self.etp is None:
            return (self.tp, self.tp_rank) if self.ep == 1 else (1, 0)
        return self.etp, self.tp_rank % self.etp if self.etp_rank is None else self.etp_rank

    @property
    def is_first_stage(self) -> bool:
        """Whether this stage has the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this stage has the head."""
        return self.pp_rank == self.pp - 1

    def stage(self, num_layers: int) -> range:
        """The global numbers of the decoder layers of this stage.

        Raises:
            TargetError: when ``layers`` do not add up to ``num_layers``.
        """
        counts = self.layers or _evenly(num_layers, self.pp)
        if sum(counts) != num_layers:
            raise TargetError(f"the stages of the target have {counts} layers, the model {num_layers}; change layers=")
        first = sum(counts[: self.pp_rank])
        return range(first, first + counts[self.pp_rank])

    def experts(self, num_experts: int) -> range:
        """The global numbers of the routed experts of this rank."""
        quotient, remainder = divmod(num_experts, self.ep)
        first = self.ep_rank * quotient + min(self.ep_rank, remainder)
        return range(first, first + quotient + (self.ep_rank < remainder))

    def padded(self, vocab_size: int, tp: int) -> int:
        """Rows of the vocabulary as the engine cuts it among ``tp`` ranks."""
        multiple = math.lcm(self.vocab_multiple, tp)
        return -(-vocab_size // multiple) * multiple

    def cut(self, hf: str, *, routed: bool) -> tuple[int, int]:
        """How the engine cuts an HF tensor.

        Args:
            hf: its name.
            routed: whether it belongs to a routed expert.

        Returns:
            The number of ranks among which it is cut, and this rank among them.
        """
        if self.is_whole(hf):
            return 1, 0
        special = ((size, rank) for pattern, size, rank in self.cuts if matches(hf, (pattern,)))
        return next(special, self.experts_cut if routed else (self.tp, self.tp_rank))

    def is_whole(self, hf: str) -> bool:
        """Whether the engine leaves this HF tensor whole."""
        return matches(hf, self.whole)


Target = Literal["everything", "nothing", "share"] | EngineRank | EngineMap
"""The part of an export that a rank gets: all HF tensors; nothing, as it only sends; a share; or an engine's slices.

The ranks with ``"share"`` get each HF tensor whole on exactly one of them, with about equally many bytes on each. An
engine's rank is described by its sizes, or by the map of its loader, which may need any slices.
"""


def engine_ranks(
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    layers: Sequence[int] | None = None,
    local_names: bool = False,
    whole: Sequence[str] = (),
    vocab_multiple: int = VOCAB_MULTIPLE,
) -> tuple[EngineRank, ...]:
    """All ranks of an engine in the order of vLLM and SGLang: tensor parallelism innermost, then pipeline stages.

    With ``ep``, each rank of a stage has whole experts. If ``ep`` is below ``tp``, neighbouring ranks share experts and
    cut them among themselves, as in SGLang.

    Args:
        tp, pp, ep, layers, local_names, whole, vocab_multiple: as for ``EngineRank``.

    Returns:
        ``tp * pp`` ranks, by their number in the engine.

    Raises:
        TargetError: when the arguments contradict each other.

    Example:
        >>> [target.tp_rank for target in mb.engine_ranks(tp=4)]
        [0, 1, 2, 3]
        >>> target = mb.engine_ranks(tp=4)[0]
        >>> dict(mb.iter_hf_weights(models, target=target))["lm_head.weight"].shape   # 96 rows, padded to 128
        torch.Size([32, 48])
    """
    _check_sizes(tp=tp, pp=pp, ep=ep)
    require(TargetError, layers=(layers, COUNTS.or_none()), whole=(whole, NAMES))
    if tp % ep:
        raise TargetError(
            f"expected ep to divide tp={tp}, found {ep}: choose another ep",
            in_python="where experts lie across data parallel engines, make each EngineRank with its own ep_rank",
        )
    etp = tp // ep
    return tuple(
        EngineRank(
            *(tp, tp_rank, pp, pp_rank, ep, tp_rank // etp, etp, tp_rank % etp),
            layers=None if layers is None else tuple(layers),
            local_names=local_names,
            whole=tuple(whole),
            vocab_multiple=vocab_multiple,
        )
        for pp_rank in range(pp)
        for tp_rank in range(tp)
    )


_MOST_RANKS = 2**20


def _check_sizes(**sizes: int) -> None:
    if wrong := {axis: size for axis, size in sizes.items() if not is_count(size) or size > _MOST_RANKS}:
        raise TargetError(
            f"expected sizes of at least 1, found {wrong}; leave out sizes that the engine does not have. No engine "
            "has more "
            f"than {_MOST_RANKS} ranks"
        )


def _evenly(num_layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, as in vLLM's ``get_pp_indices``. The last stage has the head, and gets no remainder."""
    quotient, remainder = divmod(num_layers, stages)
    return tuple(quotient + (stages - 1 - remainder <= stage < stages - 1) for stage in range(stages))
