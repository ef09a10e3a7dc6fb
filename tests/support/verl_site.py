"""Files in the place of the files of verl 0.9.1 that our module extends, with the interface that it uses."""

import contextlib
import sys
from pathlib import Path

_FILES = {
    "__init__.py": """
import importlib, os
for name in filter(None, os.getenv("VERL_USE_EXTERNAL_MODULES", "").split(",")):
    importlib.import_module(name)
""",
    "checkpoint_engine/__init__.py": "from .base import CheckpointEngine, CheckpointEngineRegistry\n",
    "checkpoint_engine/base.py": """
class CheckpointEngineRegistry:
    engines = {}

    def register(backend):
        return lambda cls: CheckpointEngineRegistry.engines.setdefault(backend, cls)

    @classmethod
    def new(cls, backend, **options):
        return cls.engines[backend](**options)


class CheckpointEngine: ...
""",
    "workers/__init__.py": "",
    "workers/engine/__init__.py": "",
    "workers/engine/megatron/__init__.py": "",
    "workers/engine/spec.py": """
from dataclasses import dataclass
from typing import Any


@dataclass
class ShardSpec:
    full_shape: tuple
    mesh: Any = None
    placements: Any = None
    place: Any = None
    gather_group: Any = None
    contributes: bool = True
""",
    "workers/rollout/__init__.py": "",
    "workers/rollout/vllm_rollout/__init__.py": "from .vllm_rollout import ServerAdapter\n",
    "workers/rollout/vllm_rollout/vllm_rollout.py": """
from types import SimpleNamespace


class ServerAdapter:
    def __init__(self, server):
        self.server, self.server_handle, self.engine_kwargs = server, None, {}
        self.config = SimpleNamespace(checkpoint_engine=self)

    def _ensure_server_handle(self):
        self.server_handle = self.server
        return self.server is not None

    async def _execute_method(self, method, args=()):
        await self.server_handle.call(method, *args)

    async def update_weights(self, weights, global_steps=None, **options):
        self.sent = list(weights), global_steps, options
""",
    "workers/rollout/vllm_rollout/bucketed_weight_transfer.py": "class BucketedWeightReceiver: ...\n",
    "workers/rollout/vllm_rollout/utils.py": """
class vLLMColocateWorkerExtension:
    def update_weights_from_ipc(self, peft_config=None, base_sync_done=False, use_shm=False):
        from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

        self.steps = ["before"]
        receiver = BucketedWeightReceiver(zmq_handle="", device=self.device, use_shm=use_shm)
        receiver.receive_weights(on_bucket_received=lambda weights, is_last: self.steps.append((weights, is_last)))
        self.steps.append("after")
""",
}


def write(folder: Path) -> str:
    """Write the packages below a folder, which then belongs on the path."""
    for name, text in _FILES.items():
        path = folder / "verl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


@contextlib.contextmanager
def on_path(folder: str):
    """This process has that verl, with our module, and afterwards what it had before."""
    own = "mcore_bridge.trainers.verl"
    taken = ("verl.", "verl", own, "megatron.bridge")

    def of_verl():
        return {name: module for name, module in sys.modules.items() if name in taken or name.startswith(taken)}

    before = of_verl()
    for name in before:
        del sys.modules[name]
    sys.path.insert(0, folder)
    try:
        import mcore_bridge.trainers.module_patch as module_patch

        module_patch._loaded.cache_clear()
        __import__(own)
        yield
    finally:
        sys.path.remove(folder)
        for name in of_verl():
            del sys.modules[name]
        module_patch._loaded.cache_clear()
        sys.modules.update(before)
