"""The published libraries that also convert between HF and megatron-core, each behind four calls with equal names.

Each builds a model with its own code, on an existing ``parallel_state``. A library is imported only when it is used,
since one of them is also named ``mcore_bridge``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AutoConfig

Pairs = Iterator[tuple[str, Tensor]]


class Library(Protocol):
    """A model of a library, built for the checkpoint in a folder and not loaded yet."""

    def exports(self) -> dict[str, Callable[[], Pairs]]:
        """The ways to give every HF tensor to every rank, by name."""

    def load(self) -> None:
        """The checkpoint into the model."""

    def save(self, target: Path) -> None:
        """The model's weights as a checkpoint of safetensors in ``target``."""


class Ours:
    """mcore_bridge of this repository."""

    def __init__(self, folder: Path, sizes: dict[str, int], device: str) -> None:
        import mcore_bridge as mb

        self._mb, self._folder = mb, folder
        dims = mb.ParallelDims(**sizes)
        dims.initialize(device=device)  # it reads the mesh from it
        self.models = mb.build_model(folder, dims=dims, device=device, load_weights=False)

    def exports(self) -> dict[str, Callable[[], Pairs]]:
        return {"default": lambda: self._mb.iter_hf_weights(self.models)}

    def load(self) -> None:
        self._mb.load_hf_weights(self.models, self._folder)

    def save(self, target: Path) -> None:
        self._mb.save_hf_checkpoint(self.models, target)


class MBridge:
    """mbridge, which needs ``rope_theta`` in a place where transformers 5 lacks it."""

    def __init__(self, folder: Path, sizes: dict[str, int], device: str) -> None:
        from mbridge import AutoBridge

        config = AutoConfig.from_pretrained(folder)
        if not hasattr(config, "rope_theta"):
            config.rope_theta = config.rope_parameters["rope_theta"]
        self._folder = str(folder)
        self._bridge = AutoBridge.from_config(config)
        self.models = self._bridge.get_model()

    def exports(self) -> dict[str, Callable[[], Pairs]]:
        return {"default": lambda: self._bridge.export_weights(self.models)}

    def load(self) -> None:
        self._bridge.load_weights(self.models, self._folder)

    def save(self, target: Path) -> None:
        self._bridge.save_weights(self.models, str(target))


class MegatronBridge:
    """Megatron-Bridge. Its progress bar is off if it has a switch."""

    def __init__(self, folder: Path, sizes: dict[str, int], device: str) -> None:
        from megatron.bridge import AutoBridge
        from megatron.core.transformer.enums import AttnBackend

        self._bridge = AutoBridge.from_hf_pretrained(str(folder))
        provider = self._bridge.to_megatron_provider(load_weights=False)
        fields = {**_config_fields(sizes), "attention_backend": AttnBackend.auto}  # its hybrids need flash-attn
        fields["gradient_accumulation_fusion"] = False  # it needs Apex
        for name, value in fields.items():
            setattr(provider, name, value)
        provider.finalize()
        self.models = provider.provide_distributed_model(wrap_with_ddp=False)
        self._tasks: Any = None

    def exports(self) -> dict[str, Callable[[], Pairs]]:
        return {"default": self.export, "tasks kept": self._export_with_tasks}

    def export(self, **options: Any) -> Pairs:
        """Every HF tensor, with further arguments of this library."""
        return iter(self._bridge.export_hf_weights(self.models, show_progress=False, **options))

    def _export_with_tasks(self) -> Pairs:
        self._tasks = self._tasks or self._bridge.get_conversion_tasks(self.models)
        return self.export(conversion_tasks=self._tasks)

    def load(self) -> None:
        self._bridge.load_hf_weights(self.models)

    def save(self, target: Path) -> None:
        self._bridge.save_hf_weights(self.models, str(target), show_progress=False)


class ModelScope:
    """mcore-bridge of ModelScope. ``peers.py`` describes the modules that replace other packages."""

    def __init__(self, folder: Path, sizes: dict[str, int], device: str) -> None:
        _stub(
            {"datasets.utils.filelock": "FileLock", "modelscope.hub.utils.utils": "get_cache_dir", "PIL.Image": "Image"}
        )
        import mcore_bridge as theirs

        config = AutoConfig.from_pretrained(folder)
        fields = {**theirs.hf_to_mcore_config(config), **_config_fields(sizes)}
        self._folder = str(folder)
        self._config = theirs.ModelConfig(**fields)
        self.models = [model.to(device) for model in theirs.get_mcore_model(self._config)]

    def exports(self) -> dict[str, Callable[[], Pairs]]:
        return {"default": lambda: self._config.bridge.export_weights(self.models)}

    def load(self) -> None:
        self._config.bridge.load_weights(self.models, self._folder)

    def save(self, target: Path) -> None:
        self._config.bridge.save_weights(self.models, str(target))


LIBRARIES: dict[str, tuple[str, Callable[[Path, dict[str, int], str], Library]]] = {
    "ours": ("mcore-hf", Ours),
    "mbridge": ("mbridge", MBridge),
    "megatron_bridge": ("megatron-bridge", MegatronBridge),
    "mcore_bridge": ("mcore_bridge", ModelScope),
}
"""For each library, by the name of its folder: its distribution, and a function that builds with it."""


def _config_fields(sizes: dict[str, int]) -> dict[str, Any]:
    """The fields of a ``TransformerConfig`` for the mesh and the dtype."""
    return {
        "tensor_model_parallel_size": sizes["tp"],
        "pipeline_model_parallel_size": sizes["pp"],
        "virtual_pipeline_model_parallel_size": sizes["vp"] if sizes["vp"] > 1 else None,
        "context_parallel_size": sizes["cp"],
        "expert_model_parallel_size": sizes["ep"],
        "expert_tensor_parallel_size": sizes["etp"],
        "sequence_parallel": bool(sizes["sp"]),
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "bf16": True,
    }


def _stub(attributes: dict[str, str]) -> None:
    """An empty module of each name that is not installed, with one attribute, and all its parents."""
    import transformers.utils

    transformers.utils.is_vision_available()  # it caches that PIL is missing
    for name, attribute in attributes.items():
        parts = name.split(".")
        try:
            __import__(name)
        except ImportError:
            for end in range(1, len(parts) + 1):
                module = ModuleType(".".join(parts[:end]))
                module.__spec__ = ModuleSpec(module.__name__, None, is_package=True)
                module.__path__ = []
                module = sys.modules.setdefault(module.__name__, module)
                if end > 1:
                    setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
            setattr(sys.modules[name], attribute, object)
