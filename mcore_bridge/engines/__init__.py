"""What authors of engines and of other receivers use. An engine's process imports it with torch alone.

``EngineWriter`` and ``export_into`` are for the trainer's process, which has megatron-core.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mcore_bridge.engines.engine_worker import EngineWorker
from mcore_bridge.weights.engine.map_engine import map_engine
from mcore_bridge.weights.engine.mapped_engine import MappedEngine
from mcore_bridge.weights.ipc.buckets import plan_buckets
from mcore_bridge.weights.ipc.receiver import Receiver
from mcore_bridge.weights.ipc.sender import BufferRing
from mcore_bridge.weights.plan.engine_map import EngineMap

if TYPE_CHECKING:
    from mcore_bridge.weights.engine.writer import EngineWriter, export_into

OF_TRAINER = ("EngineWriter", "export_into")
"""The names that an engine's process cannot import."""

__all__ = [
    "EngineWorker",
    "map_engine",
    "MappedEngine",
    "EngineMap",
    "plan_buckets",
    "BufferRing",
    "Receiver",
    "EngineWriter",
    "export_into",
]


def __getattr__(name: str) -> Any:
    if name not in OF_TRAINER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("mcore_bridge.weights.engine.writer"), name)
