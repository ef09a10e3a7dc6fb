"""An engine whose tensors are written by its map, without its loader. Its state says whether its weights are whole."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import torch

from mcore_bridge.errors import TransferError
from mcore_bridge.rules.spec import Pair, TensorSpec
from mcore_bridge.weights.engine.engine_tensors import EngineMemory, EngineModel, all_tensors, described
from mcore_bridge.weights.engine.group_copies import MapCopies, require_expected
from mcore_bridge.weights.engine.loader_thread import Loader, LoaderThread
from mcore_bridge.weights.engine.prove import disagreement
from mcore_bridge.weights.ipc.buckets import BucketPlan
from mcore_bridge.weights.ipc.shared_memory import Handle, allocate, share, share_part
from mcore_bridge.weights.plan.engine_map import EngineMap, Uncovered
from mcore_bridge.weights.plan.map_slices import MapSlices
from mcore_bridge.weights.transfer.copier import Buffers

logger = logging.getLogger(__name__)
_NO_ROUND = (
    "expected a round that was announced, found none: call begin() or share() first, and again after break_off()"
)
_CHANGED = "The engine's loading has changed since the map was made: use its loader, and make another map"


@dataclass(frozen=True, slots=True)
class EngineState:
    """Which weights an engine has at the moment.

    ``"old"``: the weights of ``version``; a round is announced and has written nothing yet. ``"half"``: parts of
    different rounds, or random values; nothing may be sampled. ``"new"``: the weights of ``version``, the last round.
    """

    weights: Literal["old", "half", "new"]
    version: int | None
    """The number of the round from which the weights are; None if they are from no round."""


class MappedEngine:
    """One rank of an engine with its map and its current tensors. ``map_engine`` makes it.

    If the engine no longer fits its map, the engine's loader loads the round, and ``reason`` says why.

    Args:
        engine_map: the map, which was proven for this engine.
        source: the engine's model, or a function that returns its tensors by name.
        load: the engine's loader, for tensors that the map does not cover, and for proofs.
        verify_every: prove the map again before every so many rounds; 0 means never.
        disproof: the reason why the map must never be used; empty if it may be used.

    Raises:
        TransferError: when the loader copies no HF tensor into any tensor of the engine.

    Example:
        >>> head = torch.nn.Linear(48, 96, bias=False)
        >>> load_weights = lambda pairs: head.weight.data.copy_(dict(pairs)["lm_head.weight"])
        >>> engine = engines.map_engine(mb.manifest(models), head, load_weights)
        >>> engine.begin(mb.manifest(models))
        >>> engine.write(list(mb.iter_hf_weights(models)))
        >>> engine.complete()
        >>> engine.require_whole()                                    # the version of the weights
        1
    """

    def __init__(
        self, engine_map: EngineMap, source: EngineModel, load: Loader, *, verify_every: int = 0, disproof: str = ""
    ) -> None:
        if not (engine_map.copies or engine_map.uncovered):
            names = [spec.name for spec in engine_map.sources]
            raise TransferError(
                "expected a loader that copies HF tensors into the engine's tensors, found that it copied none of "
                f"{len(names)}: check whether it skips their names, such as {names[:3]}"
            )
        self.map = engine_map
        self.state = EngineState("half", None)
        self.reason = ""
        """The reason why the engine's loader loads the last announced round; empty if the map is used."""
        self._memory = EngineMemory(engine_map, source)
        self._load, self._verify_every, self._disproof = load, verify_every, disproof
        self._plan: BucketPlan | Sequence[TensorSpec] | None = None
        self._sent, self._unlike = engine_map, ""
        self._expected: dict[str, TensorSpec] = {}
        self._left: set[str] | None = None
        """The HF tensors of the round that have not come yet; None between rounds."""
        self._shared: Buffers | None = None
        self._mark, self._due = torch.zeros(8, dtype=torch.uint8), 0
        self._copies = MapCopies(engine_map)
        self._is_filled = False
        self._loading: LoaderThread | None = None
        self._num_rounds = 0

    def require_whole(self) -> int:
        """Return the version of the weights. Call this before anything is sampled.

        Raises:
            TransferError: when the weights are half old and half new.
        """
        if self.state.weights == "half" or self.state.version is None:
            raise TransferError(
                "the engine's weights are half old and half new: a round has not ended, or none has come. Expected a "
                "whole round: send all buckets again and call finish() before you sample"
            )
        return self.state.version

    def begin(self, plan: BucketPlan | Sequence[TensorSpec]) -> None:
        """Announce a round of all HF tensors of ``plan``, or of the slices that the map uses.

        No weight is written unless a proof is due. If the map cannot be used, ``reason`` says why, and the engine's
        loader loads the round.

        Raises:
            TransferError: when neither the map nor the loader can load the round.
        """
        if self._left is not None:
            self.break_off()
        if self.state.weights == "new":
            self.state = EngineState("old", self.state.version)
        if plan is not self._plan:
            self._expect(plan)
        reason = self._checked()
        if reason and self._sent is not self.map:
            raise TransferError(f"{reason}. The loader takes whole HF tensors, so send these instead of slices")
        if reason and reason != self.reason:
            logger.warning("the engine's loader loads this round: %s", reason)
        self.reason, self._left, self._is_filled = reason, set(self._expected), False
        self._num_rounds += 1

    def _expect(self, plan: BucketPlan | Sequence[TensorSpec]) -> None:
        """Compare a plan with the map, once for each plan."""
        specs = specs_of(plan) if isinstance(plan, BucketPlan) else tuple(plan)
        sent, unlike = self.map, ""
        try:
            sent = MapSlices(self.map).narrowed(specs)
        except TransferError as error:
            shapes = {spec.name: tuple(spec.shape) for spec in specs}
            if any(shapes.get(spec.name) != spec.shape for spec in self.map.sources):
                raise
            unlike = str(error)
        target = plan.target if isinstance(plan, BucketPlan) else ""
        if target not in ("", self.map.digest):
            raise TransferError(
                f"the slices were made for another map: expected the digest {self.map.digest[:16]}, found "
                f"{target[:16]}; export with target= this engine's map"
            )
        self._plan, self._sent, self._unlike = plan, sent, unlike
        self._expected = {spec.name: spec for spec in specs}
        self._copies = MapCopies(sent)

    def look_ahead(self) -> None:
        """Look the engine's tensors up for the next round, while its trainer prepares it. The engine must wait."""
        with suppress(Exception):  # the round meets it again, and its trainer hears of it
            self._memory.look_ahead()

    def _checked(self) -> str:
        """The reason why the map cannot be used in this round; empty if it can."""
        if self._unlike or self._disproof:
            return self._unlike or self._disproof
        try:
            self._memory.find()
        except TransferError as error:
            return str(error)
        if self._verify_every and self._num_rounds and self._num_rounds % self._verify_every == 0:
            self.state = EngineState("half", None)
            try:
                wrong = disagreement(self._memory, self._load, self.map.sources, 2 * self._num_rounds)
                self._disproof = wrong and f"the engine's loader and its map {wrong}. {_CHANGED}"
            except TransferError as error:
                self._disproof = str(error)
        return self._disproof

    def announce(self, tensors: Sequence[TensorSpec] | None = None) -> Buffers:
        """Announce a round in which composed copies write the engine's tensors, and not HF tensors.

        From here on the weights count as half old and half new, until ``complete``.

        Args:
            tensors: the HF tensors that the round stands for, such as a ``Manifest``; None means those of the map.

        Returns:
            The engine's tensors in the order of the map, uint8 [bytes] each.

        Raises:
            TransferError: when the map cannot be used, or does not cover a tensor. Then send buckets.
        """
        if self.map.uncovered:
            names = [entry.tensor for entry in self.map.uncovered]
            raise TransferError(f"only the engine's loader writes {names}; send buckets and use copy_into")
        self.begin(tensors or self.map.sources)
        if self.reason:
            raise TransferError(f"{self.reason}. Send buckets: copy_into gives them to the engine's loader")
        self.state, self._left, self._due = EngineState("half", None), set(), 0  # the sender knows when all have come
        self._fill()
        return self._memory.buffers

    def share(self, tensors: Sequence[TensorSpec] | None = None) -> tuple[Handle, ...] | None:
        """Announce a round in which the sender writes directly into the engine's tensors, with an ``EngineWriter``.

        From here on the weights count as half old and half new, until ``complete``.

        Args:
            tensors: the HF tensors that will be written, such as a ``Manifest``; None means the HF tensors of the map.

        Returns:
            A handle for a mark (a counter of rounds), and one for each tensor of the map. None if the handles of the
            last call are still valid: no tensor has moved, and no round broke off.

        Raises:
            TransferError: as ``announce``; or when another process cannot open the engine's memory.
        """
        memory = self.announce(tensors)
        device, handles = self._memory.device, None
        if memory is not self._shared:
            parts = [share_part(part, self.map.digest) for part in memory.tensors]
            self._mark = allocate(8, device).zero_()
            handles = (share(self._mark, self.map.digest), *parts)
        self._shared = memory
        self._due = int(self._mark.view(torch.int64).item()) + 1
        _synchronize(device)
        return handles

    def more_handles(self, count: int) -> list[list[Handle]]:
        """Handles of the tensors of the map for further processes, each of which writes a part of the rounds.

        Args:
            count: the number of processes.

        Returns:
            For each process a handle of each tensor, in the order of the map. ``share`` comes before this call.

        Raises:
            TransferError: when another process cannot open the engine's memory.
        """
        tensors = self._memory.buffers.tensors
        return [[share_part(tensor, self.map.digest) for tensor in tensors] for _ in range(count)]

    def write(self, pairs: Sequence[Pair], *, stay: bool = False) -> None:
        """Put HF tensors of the round into the engine's tensors. They may be overwritten when this returns.

        A round is cheaper if its calls pass tensors like the calls of the round before.

        Args:
            pairs: HF names with their tensors.
            stay: whether later rounds pass this list object again, with tensors in unchanged memory, such as views of a
                slot. The tensors must then be contiguous, and belong to the plan of the round.

        Raises:
            TransferError: when no round was announced, or a round with other tensors.
        """
        if self._left is None:
            raise TransferError(_NO_ROUND)
        if not stay:
            require_expected(pairs, self._expected)
            pairs = [(name, tensor.contiguous()) for name, tensor in pairs]
        self.state = EngineState("half", None)
        self._left.difference_update(name for name, _ in pairs)
        if not self.reason:
            if not self._is_filled:
                self._fill()
            self._copies.run(pairs, self._memory.buffers, stay=stay)
        rest = [pair for pair in pairs if self.reason or pair[0] in self.map.by_loader]
        if rest:
            self._loading = self._loading or LoaderThread(self._load, self._memory.device)
            self._loading.send(rest)
        _synchronize(self._memory.device)

    def _fill(self) -> None:
        self._memory.fill()
        self._is_filled = True

    def complete(self, version: int | None = None) -> None:
        """End a round after all tensors have come. The weights are then ``version``, by default the number of the
        round.

        Raises:
            TransferError: when no round was announced, or not all of its tensors have come. Also when the engine has
                moved its tensors since the round began, or when the sender wrote to old addresses.
        """
        if self._left is None:
            raise TransferError(_NO_ROUND)
        if self._left:
            raise TransferError(
                f"{len(self._left)} of {len(self._expected)} tensors of the round never came, such as "
                f"{min(self._left)}; send them, or call break_off() and send a whole round again"
            )
        loading, self._loading = self._loading, None
        if loading is not None:
            self._left = None  # the round ends here, even if the loader raises
            loading.finish()
        if not self.reason and loading is None and self._memory.has_moved():  # a loader may replace tensors
            raise TransferError(
                "the engine has moved its tensors in the middle of a round, so copied values may be lost. Send all "
                "buckets again, and let the engine sleep, wake or load only between rounds"
            )
        mark = int(self._mark.view(torch.int64).item()) if self._due else 0
        if mark != self._due:
            raise TransferError(
                f"expected the sender's mark {self._due}, found {mark}: the sender did not end this round, or it "
                "wrote to old addresses of the engine's tensors. Make its EngineWriter from the last handles of share()"
            )
        self._due, self._left = 0, None
        self.state = EngineState("new", self._num_rounds if version is None else version)

    def break_off(self) -> None:
        """Forget a round that did not end, and its sender: ``share`` then returns handles for another one.

        Values that the round has written stay, and ``state`` is ``"half"`` then.
        """
        loading, self._loading = self._loading, None
        self._left, self._due, self._shared = None, 0, None
        if loading is not None:
            loading.break_off()


def engine_without_map(specs: Sequence[TensorSpec], source: EngineModel, load: Loader, engine: str) -> MappedEngine:
    """An engine whose loader takes every HF tensor in every round: its map covers nothing."""
    names = tuple(spec.name for spec in specs)
    name, first = next(iter(all_tensors(source).items()))
    uncovered = (Uncovered(name, "it was asked for", names),)
    whole = EngineMap(engine, tuple(specs), (described(name, first),), (), (), uncovered)
    return MappedEngine(whole, source, load, disproof="it was asked to take every HF tensor")


def specs_of(plan: BucketPlan) -> tuple[TensorSpec, ...]:
    """The HF tensors of a plan of buckets, in its order."""
    return tuple(TensorSpec.of(p.name, p) for bucket in plan.buckets for p in bucket.pieces)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
