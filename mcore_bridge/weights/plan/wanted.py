"""The parts of a model's parameters that a receiver gets, for each kind of target."""

from __future__ import annotations

from collections.abc import Sequence

from mcore_bridge.errors import TargetError
from mcore_bridge.rules.layout import Axes
from mcore_bridge.rules.mapping import WeightMapping
from mcore_bridge.weights.plan.engine_map import EngineMap
from mcore_bridge.weights.plan.engine_slices import Slicer
from mcore_bridge.weights.plan.inventory import ParamEntry
from mcore_bridge.weights.plan.mapped_slices import wanted_by_map
from mcore_bridge.weights.plan.target import EngineRank, Target


def wanted_by(
    target: Target, mapping: WeightMapping, axes: Axes, num_layers: int, entries: Sequence[ParamEntry]
) -> Sequence[ParamEntry]:
    """Select the parts of ``entries`` for ``target``, in their order. An engine's rank has an entry for each shard.

    Raises:
        TargetError: when the model cannot be cut for the target, or ``target`` is no target.
    """
    if isinstance(target, EngineRank):
        return tuple(Slicer(target, mapping, axes, num_layers).slices(entries))
    if isinstance(target, EngineMap):
        return tuple(wanted_by_map(target, entries))
    if target not in ("everything", "nothing"):
        raise TargetError(f'expected target="everything", "nothing", an EngineRank or an EngineMap, found {target!r}')
    return entries if target == "everything" else ()
