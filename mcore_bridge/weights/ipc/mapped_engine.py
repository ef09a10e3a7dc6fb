"""An engine whose tensors are written by its map, without its loader; it knows whether its weights are whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mcore_bridge.errors import TransferError
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.ipc.buckets import Bucket, BucketPlan
from mcore_bridge.weights.ipc.checksum import checksums
from mcore_bridge.weights.ipc.engine_copies import EngineCopies, fill
from mcore_bridge.weights.ipc.engine_tensors import Source, described, hosts, octets, plainly, tensors_named
from mcore_bridge.weights.ipc.probe import drawn_values
from mcore_bridge.weights.ipc.shared_memory import Handle, share_part
from mcore_bridge.weights.plan.engine_map import EngineMap
from mcore_bridge.weights.transfer.copier import Buffers

Pairs = Iterable[tuple[str, Tensor]]
Loader = Callable[[Iterator[tuple[str, Tensor]]], object]
"""The engine's own loader with all that it does afterwards. It takes pairs of an HF name and a tensor."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """What the weights of an engine are.

    ``"old"``: those of ``version``, while a round that was announced has not written anything. ``"half"``: partly those
    of one round and partly of another, or drawn values; nothing may be sampled. ``"new"``: those of ``version``, the
    last round.
    """

    weights: Literal["old", "half", "new"]
    version: int | None
    """The number of the round that the weights are from; None where they are of none."""


class MappedEngine:
    """One rank of an engine, its map, and its tensors as they are now. ``map_engine`` makes it.

    Args:
        engine_map: the map, which was proven for this engine.
        source: the engine's model, or a function that returns its tensors by name.
        load: the engine's loader, for tensors that the map does not cover, and for proofs.
        verify_every: prove the map again before every so many rounds; 0 is never.
    """

    def __init__(self, engine_map: EngineMap, source: Source, load: Loader, *, verify_every: int = 0) -> None:
        self.map = engine_map
        self.state = EngineState("half", None)
        self._source, self._load, self._verify_every = source, load, verify_every
        self._memory: Buffers | None = None
        self._plan: BucketPlan | Sequence[TensorSpec] | None = None
        self._shared: Buffers | None = None
        self._copies: dict[int, EngineCopies] = {}
        self._num_rounds = 0

    def require_whole(self) -> int:
        """The version of the weights. Call it before anything is sampled.

        Raises:
            TransferError: when the weights are no version's.
        """
        if self.state.weights == "half" or self.state.version is None:
            raise TransferError(
                "the engine's weights are half old and half new: a round has not ended, or none has come. Expected a "
                "whole round: send all buckets again and call finish() before you sample"
            )
        return self.state.version

    def find(self) -> None:
        """Look for the engine's tensors by their names, and compare them with the map.

        Raises:
            TransferError: when one is missing or lies otherwise in its memory; all of them are named.
        """
        with plainly():
            self._find()

    def _find(self) -> None:
        names = [tensor.name for tensor in self.map.tensors]
        held = tensors_named(self._source, [*names, *(alias[0] for alias in self.map.aliases)])
        wrong = [*self._changed(held), *self._separated(held)]
        if wrong:
            raise TransferError(
                f"the engine is not the one that its map was made for: {'; '.join(wrong)}; make another map, and use "
                "the engine's loader until then"
            )
        addresses = [held[name].data_ptr() for name in names]
        if self._memory is None or addresses != self._memory.addresses.tolist():
            self._memory = Buffers([octets(held[name]) for name in names])

    def _changed(self, held: dict[str, Tensor]) -> Iterator[str]:
        for tensor in self.map.tensors:
            if tensor.name not in held:
                yield f"{tensor.name} is missing"
            elif (now := described(tensor.name, held[tensor.name])) != tensor:
                yield f"{tensor.name}: expected {_geometry(tensor)}, found {_geometry(now)}"
            elif held[tensor.name].numel() and not held[tensor.name].data_ptr():
                yield f"{tensor.name} has no memory"

    def _separated(self, held: dict[str, Tensor]) -> Iterator[str]:
        inside = hosts(held)
        for name, tensor, start in self.map.aliases:
            if inside.get(name) != (tensor, start):
                yield f"{name}: expected memory of {tensor} from element {start} on, found {inside.get(name, 'other')}"
        for name in inside.keys() - {alias[0] for alias in self.map.aliases}:
            yield f"{name}: expected memory of its own, found that of {inside[name][0]}"

    def begin(self, plan: BucketPlan | Sequence[TensorSpec]) -> None:
        """Announce a round of all HF tensors of ``plan``; nothing of the weights is written unless a proof is due.

        Raises:
            TransferError: when the engine, or what will be sent, is not what the map was made for.
        """
        if self.state.weights == "new":
            self.state = EngineState("old", self.state.version)
        if plan is not self._plan:
            wrong = self.map.differences(specs_of(plan) if isinstance(plan, BucketPlan) else plan)
            if wrong:
                raise TransferError(
                    f"the map was made for other HF tensors: {'; '.join(wrong[:8])} ({len(wrong)} in all); make another"
                )
            self._plan, self._copies = plan, {}
        self.find()
        if self._verify_every and self._num_rounds and self._num_rounds % self._verify_every == 0:
            self.prove(self._num_rounds)
        self._num_rounds += 1

    def share(self, tensors: Sequence[TensorSpec] | None = None) -> tuple[Handle, ...] | None:
        """Announce a round in which the sender writes into the engine's tensors itself, with a ``DirectWriter``.

        From here on the weights count as half old and half new, until ``complete``.

        Args:
            tensors: the HF tensors that will be written, such as a ``Manifest``; None is those of the last round.

        Returns:
            A handle for each tensor of the map. None if the sender has them: nothing has moved since the last call.

        Raises:
            TransferError: as ``begin``; when a tensor is not covered, which only the engine's loader could write; or
                when another process cannot open the engine's memory.
        """
        if self.map.uncovered:
            names = [entry.tensor for entry in self.map.uncovered]
            raise TransferError(f"{names} are written by the engine's loader alone; send buckets and use copy_into")
        self.begin(tensors or self._plan or ())
        assert self._memory is not None
        handles = None if self._memory is self._shared else tuple(map(share_part, self._memory.tensors))
        self._shared, self.state = self._memory, EngineState("half", None)
        fill(self.map.fills, self._by_name(), self.map.dtypes)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return handles

    def copy(self, bucket: Bucket, slot: Tensor) -> None:
        """Copy what a slot holds of ``bucket`` into the engine's tensors, on the current stream."""
        assert self._memory is not None
        self.state = EngineState("half", None)
        if bucket.number == 0:
            fill(self.map.fills, self._by_name(), self.map.dtypes)
        if bucket.number not in self._copies:
            entries = [
                (copy, piece.offset, piece.dtype)
                for piece in bucket.pieces
                for copy in self.map.by_hf.get(piece.name, ())
            ]
            self._copies[bucket.number] = EngineCopies(entries, self.map.dtypes, self.map.places)
        self._copies[bucket.number].run(slot, self._memory)
        rest = [piece for piece in bucket.pieces if piece.name in self.map.by_loader]
        if rest:
            self._load((piece.name, piece.view(slot)) for piece in rest)
            self.find()  # what a loader makes anew lies elsewhere

    def complete(self, version: int | None = None) -> None:
        """All buckets of a round have come: the weights are those of ``version``, or of the next one.

        Raises:
            TransferError: when the engine has moved its tensors since the round began.
        """
        if self._has_moved():
            raise TransferError(
                "the engine has moved its tensors in the middle of a round, so copied values may be lost. Send all "
                "buckets again, and let the engine sleep, wake or load only between rounds"
            )
        self.state = EngineState("new", self._num_rounds if version is None else version)

    def copy_pairs(self, pairs: Pairs) -> None:
        """Copy HF tensors that come one by one, contiguous and on the engine's device."""
        assert self._memory is not None
        self.state = EngineState("half", None)
        fill(self.map.fills, self._by_name(), self.map.dtypes)
        for name, tensor in pairs:
            entries = [(copy, 0, tensor.dtype) for copy in self.map.by_hf.get(name, ())]
            copies = EngineCopies(entries, self.map.dtypes, self.map.places)
            copies.run_once(octets(tensor), self._memory)

    def _has_moved(self) -> bool:
        """Whether a tensor has another address than when the round began; checked quickly, as it ends every round."""
        with plainly():
            held = tensors_named(self._source, self.map.places)
            addresses = [tensor.data_ptr() for tensor in held.values()]
        return self._memory is None or addresses != self._memory.addresses.tolist()

    def prove(self, seed: int = 0) -> None:
        """Load drawn values by the engine's loader and by the map, and compare every tensor.

        The weights are lost: a whole round has to follow.

        Raises:
            TransferError: when a tensor differs; all that do are named.
        """
        reference = self.loaded(self.map.sources, 2 * seed)
        self.loaded(self.map.sources, 2 * seed + 1)
        wrong = self.differing(2 * seed, reference)
        if wrong:
            raise TransferError(
                f"the engine's loader and its map disagree on {len(wrong)} tensors, such as {wrong[0]}. The engine no "
                "longer loads as when the map was made: use its loader, and make another map"
            )

    def loaded(self, specs: Sequence[TensorSpec], seed: int) -> dict[str, int]:
        """Have the engine's loader take drawn values; the checksums of its tensors then."""
        self.state = EngineState("half", None)
        self._load(drawn_values(specs, seed, self.device))
        return self.sums()

    def differing(self, seed: int, reference: dict[str, int]) -> list[str]:
        """Copy drawn values by the map; the tensors that have other checksums then than in ``reference``."""
        self.find()
        self.copy_pairs(drawn_values(self.map.sources, seed, self.device))
        now = self.sums()
        covered = {tensor.name for tensor in self.map.tensors} - {entry.tensor for entry in self.map.uncovered}
        return [name for name in now if name in covered and now[name] != reference.get(name)]

    def sums(self) -> dict[str, int]:
        """The checksums of the tensors that the map names, as they are now."""
        held = tensors_named(self._source, [tensor.name for tensor in self.map.tensors])
        return dict(zip(held, checksums(held.values()), strict=True))

    @property
    def device(self) -> torch.device:
        """Where the engine's tensors are."""
        held = tensors_named(self._source, [tensor.name for tensor in self.map.tensors[:1]])
        return next((tensor.device for tensor in held.values()), torch.device("cpu"))

    def _by_name(self) -> dict[str, Tensor]:
        assert self._memory is not None
        return dict(zip(self.map.places, self._memory.tensors, strict=True))


def specs_of(plan: BucketPlan) -> tuple[TensorSpec, ...]:
    """The HF tensors of a plan of buckets, in its order."""
    return tuple(TensorSpec(p.name, p.shape, p.dtype) for bucket in plan.buckets for p in bucket.pieces)


def _geometry(tensor: object) -> str:
    return ", ".join(f"{field} {getattr(tensor, field)}" for field in ("shape", "strides", "dtype"))
