"""What an inference engine's process imports. It needs torch, and neither megatron-core nor transformers."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "EngineWorker": "engines.engine_worker",
    "map_engine": "weights.engine.map_engine",
    "MappedEngine": "weights.engine.mapped_engine",
    "EngineMap": "weights.plan.engine_map",
    "BufferRing": "weights.ipc.sender",
    "Receiver": "weights.ipc.receiver",
    "plan_buckets": "weights.ipc.buckets",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"mcore_bridge.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
