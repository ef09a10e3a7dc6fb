"""What an inference engine's process imports. It needs torch, and neither megatron-core nor transformers."""

from mcore_bridge.engines.engine_worker import EngineWorker
from mcore_bridge.weights.engine.map_engine import map_engine
from mcore_bridge.weights.engine.mapped_engine import MappedEngine
from mcore_bridge.weights.ipc.buckets import plan_buckets
from mcore_bridge.weights.ipc.receiver import Receiver
from mcore_bridge.weights.ipc.sender import BufferRing
from mcore_bridge.weights.plan.engine_map import EngineMap

__all__ = ["EngineWorker", "map_engine", "MappedEngine", "EngineMap", "BufferRing", "Receiver", "plan_buckets"]
