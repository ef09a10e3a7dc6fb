"""Who gets what of an export: each rank says for itself. Everything, nothing, or what a rank of an engine holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mcore_bridge.errors import TargetError
from mcore_bridge.rules.mapping import matches

VOCAB_MULTIPLE = 64
"""To what vLLM and SGLang pad vocabularies before they cut them."""


@dataclass(frozen=True, slots=True)
class EngineRank:
    """One rank of a rollout engine, which holds slices of HF tensors.

    What the engine cuts is what megatron-core cuts at the same sizes, in whole heads: with more ranks than KV heads,
    several ranks hold the same ones. Tensors have HF's names and orientation, and nothing is padded.

    Args:
        tp, tp_rank: tensor parallelism, and this rank's place in it.
        pp, pp_rank: pipeline parallelism. The first stage has the embedding, the last one the final norm, the head, MTP
            layers, and the embedding again if the head is tied to it.
        ep, ep_rank: expert parallelism. Each rank has whole experts, neighbours; the first ranks one more if need be.
        etp, etp_rank: tensor parallelism of routed experts. None is that of all else with ``ep=1``, and otherwise none.
        layers: decoder layers of each stage. None is as vLLM deals them: evenly, and what is left over to the last of
            those stages that have no head.
        local_names: number decoder layers from 0 in each stage. Experts in one tensor for all of a layer always count
            from the first that this rank has.
        whole: ``fnmatch`` patterns of the names of HF tensors that the engine does not cut.
        vocab_multiple: to what the engine pads vocabularies before it cuts them.
        cuts: ``(pattern, size, rank)`` for HF tensors that the engine cuts otherwise, named as in ``whole``; the first
            that matches counts. Engines with data parallel attention do so.

    Raises:
        TargetError: when these do not fit each other.
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
        _check_sizes(tp=self.tp, pp=self.pp, ep=self.ep, **({} if self.etp is None else {"etp": self.etp}))
        for axis, size, rank in (
            ("tp", self.tp, self.tp_rank),
            ("pp", self.pp, self.pp_rank),
            ("ep", self.ep, self.ep_rank),
            ("etp", *self.experts_cut),
            *self.cuts,
        ):
            if not (isinstance(rank, int) and 0 <= rank < size):
                raise TargetError(f"expected {axis} of at least 1 and {axis}_rank below it, found {size} and {rank!r}")
        if self.layers is not None and (len(self.layers) != self.pp or min(self.layers) < 0):
            raise TargetError(f"expected layers= with a number for each of pp={self.pp} stages, found {self.layers}")

    @property
    def experts_cut(self) -> tuple[int, int]:
        """Size of, and place in, the tensor parallelism of routed experts."""
        if self.etp is None:
            return (self.tp, self.tp_rank) if self.ep == 1 else (1, 0)
        return self.etp, self.tp_rank % self.etp if self.etp_rank is None else self.etp_rank

    @property
    def is_first_stage(self) -> bool:
        """Whether the embedding is here."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether the head is here."""
        return self.pp_rank == self.pp - 1

    def stage(self, num_layers: int) -> range:
        """The global numbers of the decoder layers of this stage.

        Raises:
            TargetError: when ``layers`` are others.
        """
        counts = self.layers or _evenly(num_layers, self.pp)
        if sum(counts) != num_layers:
            raise TargetError(f"the stages of the target have {counts} layers, the model {num_layers}; change layers=")
        first = sum(counts[: self.pp_rank])
        return range(first, first + counts[self.pp_rank])

    def experts(self, num_experts: int) -> range:
        """The global numbers of the routed experts of this rank."""
        each, more = divmod(num_experts, self.ep)
        first = self.ep_rank * each + min(self.ep_rank, more)
        return range(first, first + each + (self.ep_rank < more))

    def padded(self, vocab_size: int, tp: int) -> int:
        """Rows of the vocabulary as the engine cuts it among ``tp`` ranks."""
        multiple = math.lcm(self.vocab_multiple, tp)
        return -(-vocab_size // multiple) * multiple

    def cut(self, hf: str, *, routed: bool) -> tuple[int, int]:
        """Among how many ranks the engine cuts this HF tensor, and this rank's place; ``routed`` is of an expert."""
        if self.is_whole(hf):
            return 1, 0
        found = (each[1:] for each in self.cuts if matches(hf, each[:1]))
        return next(found, self.experts_cut if routed else (self.tp, self.tp_rank))

    def is_whole(self, hf: str) -> bool:
        """Whether the engine does not cut this HF tensor."""
        return matches(hf, self.whole)


Target = Literal["everything", "nothing"] | EngineRank
"""What this rank gets: every HF tensor whole; none, so that it only sends; or what a rank of an engine holds."""


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

    With ``ep`` the ranks of a stage have whole experts each; if ``ep`` is below ``tp``, neighbours have the same ones
    and cut them among themselves, as in SGLang.

    >>> mb.iter_hf_weights(models, target=mb.engine_ranks(tp=4)[rank % 4])

    Args:
        tp, pp, ep, layers, local_names, whole, vocab_multiple: as for ``EngineRank``.

    Raises:
        TargetError: when these do not fit each other.
    """
    _check_sizes(tp=tp, pp=pp, ep=ep)
    if tp % ep:
        raise TargetError(
            f"expected ep to divide tp={tp}, found {ep}; where experts lie across data parallel engines, make each "
            "EngineRank with its own ep_rank"
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


def _check_sizes(**sizes: int) -> None:
    wrong = {axis: size for axis, size in sizes.items() if not isinstance(size, int) or size < 1}
    if wrong:
        raise TargetError(f"expected sizes of at least 1, found {wrong}; leave out what the engine does not have")


def _evenly(num_layers: int, stages: int) -> tuple[int, ...]:
    """As vLLM's ``get_pp_indices``: the last stage has the head, so that it gets none of what is left over."""
    each, more = divmod(num_layers, stages)
    return tuple(each + (stages - 1 - more <= stage < stages - 1) for stage in range(stages))
