"""An engine written by a map of its loader: the map is found or one that was kept is proven."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from mcore_bridge.arguments import FUNCTION, LEAST_0, Kind, instance_of, list_of, require
from mcore_bridge.errors import TransferError
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.ipc.buckets import BucketPlan
from mcore_bridge.weights.ipc.engine_memory import EngineMemory
from mcore_bridge.weights.ipc.engine_proof import differing, disagreeing
from mcore_bridge.weights.ipc.engine_tensors import Source
from mcore_bridge.weights.ipc.fed_loader import Loader
from mcore_bridge.weights.ipc.find_map import Finding
from mcore_bridge.weights.ipc.mapped_engine import MappedEngine, specs_of
from mcore_bridge.weights.plan.engine_map import EngineMap

logger = logging.getLogger(__name__)


_SPECS = list_of("a plan, or specs such as those of a manifest", TensorSpec)


def map_engine(
    plan: BucketPlan | Iterable[TensorSpec],
    source: Source,
    load: Loader,
    *,
    engine: str = "",
    kept: EngineMap | None = None,
    verify_every: int = 0,
) -> MappedEngine:
    """Find the slices of HF tensors that make up each tensor of an engine, and prove the result.

    The engine's loader runs twice, or once for a kept map. It runs two or three times more if it writes tensors other
    than by torch's copies, such as by a kernel. If it computes some, it runs up to five times more. The engine's
    weights are lost: a whole round must follow.

    Args:
        plan: the HF tensors that will come: ``Receiver.plan``, or specs such as those of a ``Manifest``.
        source: the engine's model, or a function that returns its tensors by name. Each round looks them up again.
        load: the engine's own loader, called with pairs of an HF name and a tensor. It must include the engine's work
            after loading.
        engine: a line that identifies engine, release, model, and this rank's place in the engine's mesh. A kept map
            must have the same line.
        kept: an earlier map, such as ``EngineMap.load(path)``. One run of the loader proves it. If it does not fit this
            engine, the log says why, and a map is made as if there were none.
        verify_every: prove the map again before every so many rounds, by two runs of the loader; 0 is never.

    Example:
        >>> head = torch.nn.Linear(48, 96, bias=False)                # an engine, and its loader
        >>> def load_weights(pairs):
        ...     for name, tensor in pairs:
        ...         if name == "lm_head.weight":
        ...             head.weight.data.copy_(tensor)
        >>> plan = mb.plan_buckets(mb.manifest(models))
        >>> engine = mb.map_engine(plan, head, load_weights, engine="example, tp 0 of 1")
        >>> len(engine.map.tensors), engine.map.uncovered             # then receiver.copy_into(number, engine)
        (1, ())
    """
    require(
        TransferError,
        plan=(plan, instance_of("a plan, or specs such as those of a manifest", BucketPlan, Iterable)),
        source=(source, Kind("a module, or a function that returns tensors by name", callable)),
        load=(load, FUNCTION),
        engine=(engine, instance_of("a line of text", str)),
        kept=(kept, instance_of("an EngineMap", EngineMap).or_none()),
        verify_every=(verify_every, LEAST_0),
    )
    specs = specs_of(plan) if isinstance(plan, BucketPlan) else tuple(plan)
    require(TransferError, plan=(specs, _SPECS))
    if kept is not None:
        try:
            return _proven(kept, specs, source, load, engine, verify_every)
        except TransferError as error:
            logger.warning("%s. It is made anew now", error)
    finding = Finding(specs, source, load, engine)
    made, disproof = finding.make(), ""
    for entry in made.uncovered:
        logger.warning("%s goes by the engine's loader in every round: %s", entry.tensor, entry.reason)
    if made.uncovered:
        disproof = _spoiled(EngineMemory(made, source), load, finding.reference)
    return MappedEngine(made, source, load, verify_every=verify_every, disproof=disproof)


def _spoiled(memory: EngineMemory, load: Loader, reference: dict[str, int]) -> str:
    """Why map and loader do not give all tensors together; empty if they do.

    An example is a loader that makes all parameters of a layer anew, also those for which it was given nothing.
    """
    wrong = differing(memory, load, 0, reference)
    if not wrong:
        return ""
    return f"{len(wrong)} tensors are wrong if the loader takes only what the map leaves, such as {wrong[0]}"


def _proven(
    kept: EngineMap, specs: Sequence[TensorSpec], source: Source, load: Loader, engine: str, verify_every: int
) -> MappedEngine:
    wrong = kept.differences(specs)
    if kept.engine != engine:
        wrong.insert(0, f"expected an engine {engine!r}, found {kept.engine!r}")
    if wrong:
        raise TransferError(f"the kept map is another engine's: {'; '.join(wrong[:8])}")
    memory = EngineMemory(kept, source)
    memory.find()
    wrong = kept.problems(memory.device)
    if wrong:
        raise TransferError(f"the kept map is damaged: {'; '.join(wrong[:8])}")
    wrong = disagreeing(memory, load, specs, 0)
    if wrong:
        raise TransferError(
            f"the kept map and the engine's loader disagree on {len(wrong)} tensors, such as {wrong[0]}"
        )
    return MappedEngine(kept, source, load, verify_every=verify_every)
