"""How an engine map is found: record the loader, probe what recording did not explain, and prove each step.

Every recorded or probed slice is a guess until it is proven. Two sets of random values go through the engine's loader.
Then the map copies the first set again, and every bit has to equal the result of the loader.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mcore_bridge.arguments import FUNCTION, LEAST_0, Kind, instance_of, list_of, require
from mcore_bridge.errors import TransferError
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.engine.engine_tensors import (
    EngineMemory,
    EngineModel,
    all_tensors,
    described,
    device_of,
    hosts,
)
from mcore_bridge.weights.engine.loader_thread import Loader
from mcore_bridge.weights.engine.mapped_engine import MappedEngine, specs_of
from mcore_bridge.weights.engine.probe import MOST_SLICES, RunningNumbers, probe
from mcore_bridge.weights.engine.prove import checksums, differing, drawn_values, prove_kept
from mcore_bridge.weights.engine.recorder import Recorder
from mcore_bridge.weights.engine.traced_storage import Piece
from mcore_bridge.weights.ipc.buckets import BucketPlan
from mcore_bridge.weights.plan.boxes import are_apart
from mcore_bridge.weights.plan.engine_map import EngineMap, EngineTensor, SliceCopy, SliceFill, Uncovered

logger = logging.getLogger(__name__)
_PLAN = "a plan, or specs such as those of a manifest"
_ADVICE = "pass plan_buckets(...) or manifest(models)"
_SPECS = list_of(_PLAN, TensorSpec, advice=_ADVICE)


def map_engine(
    plan: BucketPlan | Iterable[TensorSpec],
    source: EngineModel,
    load: Loader,
    *,
    engine: str = "",
    kept: EngineMap | None = None,
    verify_every: int = 0,
) -> MappedEngine:
    """Find the slices of HF tensors that make up each tensor of an engine, and prove the result.

    The engine's loader runs twice, or once for a kept map. If it writes some tensors without torch's copies, such as by
    a kernel, it runs two or three times more. If it computes some tensors, it runs up to five times more. The engine's
    weights are overwritten: a whole round must follow.

    Args:
        plan: the HF tensors that will come: ``Receiver.plan``, or specs such as those of a ``Manifest``.
        source: the engine's model, or a function that returns its tensors by name. Each round looks them up again.
        load: the engine's loader, called with pairs of an HF name and a tensor. It must include the engine's work after
            loading.
        engine: a line that identifies engine, release, model, and this rank's place in the engine's mesh. A kept map
            must have the same line.
        kept: an earlier map, such as ``EngineMap.load(path)``. One run of the loader proves it. If it does not fit this
            engine, the reason is logged, and a new map is made.
        verify_every: prove the map again before every so many rounds, by two runs of the loader; 0 means never.

    Returns:
        The engine with its proven map.

    Raises:
        TransferError: an argument has a wrong type, or the loader copies no HF tensor into any tensor of the engine.

    Example:
        >>> head = torch.nn.Linear(48, 96, bias=False)                # an engine, and its loader
        >>> def load_weights(pairs):
        ...     for name, tensor in pairs:
        ...         if name == "lm_head.weight":
        ...             head.weight.data.copy_(tensor)
        >>> plan = engines.plan_buckets(mb.manifest(models))
        >>> engine = engines.map_engine(plan, head, load_weights, engine="example, tp 0 of 1")
        >>> len(engine.map.tensors), engine.map.uncovered             # then receiver.copy_into(number, engine)
        (1, ())
    """
    require(
        TransferError,
        plan=(plan, instance_of(_PLAN, BucketPlan, Iterable, advice=_ADVICE)),
        source=(source, Kind("a module, or a function that returns tensors by name", callable, "pass one of them")),
        load=(load, FUNCTION),
        engine=(engine, instance_of("a line of text", str, advice="name the engine's rank")),
        kept=(kept, instance_of("an EngineMap", EngineMap, advice="read one by EngineMap.load").or_none()),
        verify_every=(verify_every, LEAST_0),
    )
    specs = specs_of(plan) if isinstance(plan, BucketPlan) else tuple(plan)
    require(TransferError, plan=(specs, _SPECS))
    if kept is not None:
        try:
            prove_kept(EngineMemory(kept, source), load, specs, engine)
            return MappedEngine(kept, source, load, verify_every=verify_every)
        except TransferError as error:
            logger.warning("%s. A new map is made now", error)
    search = MapSearch(specs, source, load, engine)
    made, disproof = search.make(), ""
    for entry in made.uncovered:
        logger.warning("the engine's loader writes %s in every round: %s", entry.tensor, entry.reason)
    if made.uncovered and (wrong := differing(EngineMemory(made, source), load, 0, search.reference)):
        # such as a loader that makes all parameters of a layer again, even if it got tensors for only some of them
        disproof = f"{len(wrong)} tensors are wrong if the loader takes only what the map leaves, such as {wrong[0]}"
    return MappedEngine(made, source, load, verify_every=verify_every, disproof=disproof)


@dataclass
class _Tensor:
    """One of the engine's tensors, and the slices that have explained it so far."""

    described: EngineTensor
    hf: frozenset[str]
    copies: list[SliceCopy] | None = None
    """None if nothing explains the tensor yet."""
    fills: list[SliceFill] = field(default_factory=list)
    reason: str = "its loader computes it"


class MapSearch:
    """An engine while its map is made."""

    def __init__(self, specs: Sequence[TensorSpec], source: EngineModel, load: Loader, engine: str) -> None:
        self._specs, self._source, self._load, self._engine = tuple(specs), source, load, engine
        self._by_name = {spec.name: spec for spec in specs}
        self._device = device_of(source)
        self._tensors: dict[str, _Tensor] = {}
        self._aliases: dict[str, tuple[str, int]] = {}
        self.reference: dict[str, int] = {}
        """Checksums of the engine's tensors after its loader took the first drawn values."""

    def make(self) -> EngineMap:
        """Record, prove, probe the tensors that are not explained, and prove again."""
        self._record()
        self._give_up_unproven()
        wanting = [name for name, tensor in self._tensors.items() if tensor.copies is None]
        if wanting:
            self._probe(wanting, frozenset[str]().union(*(self._tensors[name].hf for name in wanting)))
            constant = {name for name in wanting if self._tensors[name].fills}
            wanting = self._give_up_unproven()
            if not constant.isdisjoint(wanting):  # made of HF tensors that the recorder did not find there
                self._probe(wanting, frozenset(self._by_name))
                wanting = self._give_up_unproven()
            for name in wanting:
                self._tensors[name].reason = "its loader computes it: the slices that a probe found give other values"
        return self._map()

    def _record(self) -> None:
        """Load drawn values, then others under the recorder. Tensors that differ depend on HF tensors.

        The proof uses the first values. So a constant that the recorder finds must be a constant for these values, too.
        """
        self._load(drawn_values(self._specs, 0, self._device))
        first = checksums({name: tensor for name, tensor in all_tensors(self._source).items() if not tensor.is_meta})
        recorder = Recorder()
        with recorder:
            self._load(recorder.watched(drawn_values(self._specs, 1, self._device)))
        held = all_tensors(self._source)
        inside = hosts(held)
        seen = {name: recorder.names_in(tensor) for name, tensor in held.items() if name not in inside}
        unseen = {name: held[name] for name, names in seen.items() if not (names or held[name].is_meta)}
        changed = {name for name, total in checksums(unseen).items() if total != first.get(name)}
        for name, names in seen.items():
            if held[name].is_meta:
                continue
            known = self._explained(name, held[name], recorder.traced(held[name]), names)
            if names or name in changed or known.fills:  # constants of the loader may be lost while an engine sleeps
                self._tensors[name] = known
        self._aliases = {name: place for name, place in inside.items() if place[0] in self._tensors}
        self.reference = {name: first.get(name, 0) for name in self._tensors}

    def _explained(self, name: str, tensor: Tensor, pieces: Sequence[Piece], seen: frozenset[str]) -> _Tensor:
        """A tensor with the slices that the recorder found; without slices if they do not explain all of it."""
        known = _Tensor(described(name, tensor), seen)
        span = known.described.span
        if any(piece.box.target < 0 or piece.box.target_end > span for piece in pieces):
            return known
        visible = _visible(pieces, span, tensor.device)
        if visible is None:
            return known
        pieces, num_written = visible
        known.copies = [
            SliceCopy(piece.hf, name, piece.box, self._casts(piece, tensor)) for piece in pieces if piece.hf is not None
        ]
        known.fills = [SliceFill(name, p.box, p.bits) for p in pieces if p.hf is None and p.bits is not None]
        known.described = replace(known.described, kept=tensor.numel() - num_written)
        return known

    def _casts(self, piece: Piece, tensor: Tensor) -> bool:
        return piece.casts and piece.hf is not None and self._by_name[piece.hf].dtype != tensor.dtype

    def _give_up_unproven(self) -> list[str]:
        """Copy the first random values by the map. Drop the slices of tensors that differ; return their names."""
        wrong = differing(EngineMemory(self._map(), self._source), None, 0, self.reference)
        for name in wrong:
            tensor = self._tensors[name]
            tensor.copies, tensor.fills = None, []
            tensor.described = replace(tensor.described, kept=0)
        return wrong

    def _probe(self, names: Sequence[str], numbered: frozenset[str]) -> None:
        """Explain the engine's tensors ``names`` by probing with these HF tensors."""
        known = {name: self._tensors[name] for name in names}
        if not all(tensor.hf for tensor in known.values()):
            numbered = frozenset(self._by_name)
        dtypes = {}
        for name, tensor in known.items():
            of_hf = {self._by_name[hf].dtype for hf in tensor.hf}
            dtypes[name] = of_hf.pop() if len(of_hf) == 1 else tensor.described.dtype
        numbering = RunningNumbers(self._specs, numbered)
        for name, copies, fills in probe(numbering, self._load, self._source, dtypes, self._device):
            if len(copies) > MOST_SLICES:
                known[name].reason = f"it is made of more than {MOST_SLICES} slices"
                continue
            known[name].copies, known[name].fills = copies, fills
            known[name].hf |= {copy.hf for copy in copies}

    def _map(self) -> EngineMap:
        tensors = self._tensors.values()
        return EngineMap(
            self._engine,
            self._specs,
            tuple(tensor.described for tensor in tensors),
            tuple(copy for tensor in tensors for copy in tensor.copies or ()),
            tuple(entry for tensor in tensors for entry in tensor.fills),
            tuple(
                Uncovered(tensor.described.name, tensor.reason, self._in_order(tensor.hf))
                for tensor in tensors
                if tensor.copies is None
            ),
            tuple((name, host, start) for name, (host, start) in self._aliases.items()),
        )

    def _in_order(self, names: frozenset[str]) -> tuple[str, ...]:
        """HF names in the order in which they are sent; all of them if ``names`` is empty."""
        return tuple(spec.name for spec in self._specs if not names or spec.name in names)


def _visible(pieces: Sequence[Piece], span: int, device: torch.device) -> tuple[Sequence[Piece], int] | None:
    """The pieces that later pieces do not overwrite entirely, and the number of elements that they write.

    None if some are computed, or if a copy is partly overwritten.
    """
    if are_apart(piece.box for piece in pieces):
        is_explained = not any(piece.is_computed for piece in pieces)
        return (pieces, sum(piece.box.num_elements for piece in pieces)) if is_explained else None
    painted = torch.zeros(span, dtype=torch.bool, device=device)
    visible = []
    for piece in reversed(pieces):  # the last write into an element decides its value
        place = piece.box.target_in(painted)
        num_painted = int(place.sum())
        if num_painted == piece.box.num_elements:
            continue
        if piece.is_computed or (num_painted and piece.hf is not None):
            return None
        place.fill_(True)
        visible.append(piece)
    return visible[::-1], int(painted.sum())
