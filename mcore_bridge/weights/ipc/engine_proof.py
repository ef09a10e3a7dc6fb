"""Whether a map does what the engine's loader does: drawn values go both ways, and every bit has to be the same.

All of these overwrite the engine's weights, so a whole round has to follow.
"""

from __future__ import annotations

from collections.abc import Sequence

from mcore_bridge.errors import TransferError
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.ipc.engine_memory import EngineMemory
from mcore_bridge.weights.ipc.fed_loader import Loader
from mcore_bridge.weights.ipc.probe import drawn_values


def prove(memory: EngineMemory, load: Loader, seed: int = 0) -> None:
    """Load drawn values by the engine's loader and by the map, and compare every tensor.

    Raises:
        TransferError: when a tensor differs, or the engine is not that of the map.
    """
    wrong = disagreeing(memory, load, memory.map.sources, 2 * seed)
    if wrong:
        raise TransferError(
            f"the engine's loader and its map disagree on {len(wrong)} tensors, such as {wrong[0]}. The engine no "
            "longer loads as when the map was made: use its loader, and make another map"
        )


def disagreeing(memory: EngineMemory, load: Loader, specs: Sequence[TensorSpec], seed: int) -> list[str]:
    """The tensors that differ after the loader, and after the map, took the drawn values of ``specs``."""
    load(drawn_values(specs, seed, memory.device))
    reference = memory.sums()
    _forget(memory, load, seed + 1)
    return differing(memory, load, seed, reference)


def differing(memory: EngineMemory, load: Loader | None, seed: int, reference: dict[str, int]) -> list[str]:
    """Put drawn values into the engine; the tensors that have other checksums then than in ``reference``.

    Args:
        load: the engine's loader, for what the map does not cover; None compares only what it covers.
    """
    _put(memory, load, seed)
    left_out = () if load else {entry.tensor for entry in memory.map.uncovered}
    now = memory.sums()
    return [
        name
        for name in reference
        if name in memory.map.places and name not in left_out and now.get(name) != reference[name]
    ]


def _put(memory: EngineMemory, load: Loader | None, seed: int) -> None:
    memory.find()
    rest = memory.copy(drawn_values(memory.map.sources, seed, memory.device))
    if memory.map.by_loader and load:
        load(rest)
    for _ in rest:
        pass


def _forget(memory: EngineMemory, load: Loader, seed: int) -> None:
    """Replace what the loader has written by something else, except where the map says that it writes nothing."""
    if any(tensor.kept for tensor in memory.map.tensors) or memory.map.uncovered:
        _put(memory, load, seed)
        return
    memory.find()
    memory.invert()
