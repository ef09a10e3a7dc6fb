"""Builds HuggingFace models as Megatron-Core ``GPTModel``s on any mesh, and exports their weights back, exactly.

>>> import mcore_bridge as mb
>>> models = mb.build_model("path/of/Qwen3-8B")       # this rank's chunks, weights loaded
>>> for name, tensor in mb.iter_hf_weights(models):   # every HF tensor, whole, on every rank
...     ...

The import changes nothing in torch, transformers or megatron-core, and needs no GPU and no process group. Public names
are imported when they are first used.
"""

import os
import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcore_bridge.architecture import Architecture as Architecture
    from mcore_bridge.architecture import register as register
    from mcore_bridge.batches.drafting import drafting as drafting
    from mcore_bridge.batches.forward import TokenOutputs as TokenOutputs
    from mcore_bridge.batches.forward import forward as forward
    from mcore_bridge.batches.logprobs import log_probs as log_probs
    from mcore_bridge.batches.packing import PackedSequences as PackedSequences
    from mcore_bridge.batches.packing import pack_sequences as pack_sequences
    from mcore_bridge.batches.packing import unpack_sequences as unpack_sequences
    from mcore_bridge.config.mesh.parallel_dims import ParallelDims as ParallelDims
    from mcore_bridge.cpu import enable_cpu as enable_cpu
    from mcore_bridge.errors import BatchError as BatchError
    from mcore_bridge.errors import BridgeError as BridgeError
    from mcore_bridge.errors import CheckpointError as CheckpointError
    from mcore_bridge.errors import ConfigError as ConfigError
    from mcore_bridge.errors import ExportError as ExportError
    from mcore_bridge.errors import LostRankError as LostRankError
    from mcore_bridge.errors import MappingError as MappingError
    from mcore_bridge.errors import MeshError as MeshError
    from mcore_bridge.errors import TargetError as TargetError
    from mcore_bridge.errors import TransferError as TransferError
    from mcore_bridge.factory.adapter_sets import set_adapters as set_adapters
    from mcore_bridge.factory.adapter_sets import without_adapters as without_adapters
    from mcore_bridge.factory.add_adapters import add_adapters as add_adapters
    from mcore_bridge.factory.build import build_model as build_model
    from mcore_bridge.factory.build_draft import build_draft as build_draft
    from mcore_bridge.factory.gpt_inputs import to_gpt_arguments as to_gpt_arguments
    from mcore_bridge.factory.gpt_inputs import to_layer_spec as to_layer_spec
    from mcore_bridge.factory.gpt_inputs import to_transformer_config as to_transformer_config
    from mcore_bridge.factory.supports import Support as Support
    from mcore_bridge.factory.supports import list_families as list_families
    from mcore_bridge.factory.supports import supports as supports
    from mcore_bridge.rules.adapters import Adapters as Adapters
    from mcore_bridge.sync.vllm_source import vllm_source as vllm_source
    from mcore_bridge.sync.weight_sync import WeightSync as WeightSync
    from mcore_bridge.weights.bound import adopt as adopt
    from mcore_bridge.weights.dist_checkpoint.checkpoint import CheckpointReport as CheckpointReport
    from mcore_bridge.weights.dist_checkpoint.checkpoint import load_checkpoint as load_checkpoint
    from mcore_bridge.weights.dist_checkpoint.checkpoint import save_checkpoint as save_checkpoint
    from mcore_bridge.weights.engine.map_engine import map_engine as map_engine
    from mcore_bridge.weights.engine.writer import EngineWriter as EngineWriter
    from mcore_bridge.weights.engine.writer import export_into as export_into
    from mcore_bridge.weights.export import iter_hf_shards as iter_hf_shards
    from mcore_bridge.weights.export import iter_hf_weights as iter_hf_weights
    from mcore_bridge.weights.export import to_hf_state_dict as to_hf_state_dict
    from mcore_bridge.weights.files.background import PendingSave as PendingSave
    from mcore_bridge.weights.ipc.buckets import plan_buckets as plan_buckets
    from mcore_bridge.weights.ipc.receiver import Receiver as Receiver
    from mcore_bridge.weights.ipc.sender import BufferRing as BufferRing
    from mcore_bridge.weights.load import load_hf_weights as load_hf_weights
    from mcore_bridge.weights.load_state import LoadReport as LoadReport
    from mcore_bridge.weights.manifest import Manifest as Manifest
    from mcore_bridge.weights.manifest import manifest as manifest
    from mcore_bridge.weights.peft.hf_adapters import iter_hf_adapters as iter_hf_adapters
    from mcore_bridge.weights.peft.hf_adapters import load_adapters as load_adapters
    from mcore_bridge.weights.peft.hf_adapters import save_hf_adapters as save_hf_adapters
    from mcore_bridge.weights.plan.engine_map import EngineMap as EngineMap
    from mcore_bridge.weights.plan.target import EngineRank as EngineRank
    from mcore_bridge.weights.plan.target import engine_ranks as engine_ranks
    from mcore_bridge.weights.progress import show_progress as show_progress
    from mcore_bridge.weights.provenance import mapping as mapping
    from mcore_bridge.weights.save import save_hf_checkpoint as save_hf_checkpoint


def _warn_of_other_package() -> None:
    """Warn if the distribution mcore-bridge is installed. pip writes its package over ours, or ours over it.

    Folders are listed, since ``importlib.metadata`` would take longer than all of this import.
    """
    for folder in filter(os.path.isdir, sys.path):
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        if any(name.startswith("mcore_bridge-") and name.endswith(".dist-info") for name in names):
            warnings.warn(
                f"{folder} has the distribution mcore-bridge of ModelScope, whose package is named mcore_bridge, too. "
                "One may have overwritten files of the other: pip uninstall mcore-bridge mcore-hf, then install the "
                "one that you use",
                stacklevel=3,
            )


_warn_of_other_package()

_HOMES = {
    "ParallelDims": "config.mesh.parallel_dims",
    "build_model": "factory.build",
    "build_draft": "factory.build_draft",
    "adopt": "weights.bound",
    "load_hf_weights": "weights.load",
    "iter_hf_weights": "weights.export",
    "to_hf_state_dict": "weights.export",
    "iter_hf_shards": "weights.export",
    "save_hf_checkpoint": "weights.save",
    "manifest": "weights.manifest",
    "save_checkpoint": "weights.dist_checkpoint.checkpoint",
    "PendingSave": "weights.files.background",
    "load_checkpoint": "weights.dist_checkpoint.checkpoint",
    "CheckpointReport": "weights.dist_checkpoint.checkpoint",
    "engine_ranks": "weights.plan.target",
    "EngineRank": "weights.plan.target",
    "plan_buckets": "weights.ipc.buckets",
    "BufferRing": "weights.ipc.sender",
    "Receiver": "weights.ipc.receiver",
    "map_engine": "weights.engine.map_engine",
    "EngineMap": "weights.plan.engine_map",
    "export_into": "weights.engine.writer",
    "EngineWriter": "weights.engine.writer",
    "WeightSync": "sync.weight_sync",
    "vllm_source": "sync.vllm_source",
    "forward": "batches.forward",
    "drafting": "batches.drafting",
    "TokenOutputs": "batches.forward",
    "log_probs": "batches.logprobs",
    "pack_sequences": "batches.packing",
    "unpack_sequences": "batches.packing",
    "PackedSequences": "batches.packing",
    "to_transformer_config": "factory.gpt_inputs",
    "to_gpt_arguments": "factory.gpt_inputs",
    "to_layer_spec": "factory.gpt_inputs",
    "mapping": "weights.provenance",
    "show_progress": "weights.progress",
    "add_adapters": "factory.add_adapters",
    "Adapters": "rules.adapters",
    "iter_hf_adapters": "weights.peft.hf_adapters",
    "save_hf_adapters": "weights.peft.hf_adapters",
    "load_adapters": "weights.peft.hf_adapters",
    "without_adapters": "factory.adapter_sets",
    "set_adapters": "factory.adapter_sets",
    "Architecture": "architecture",
    "register": "architecture",
    "LoadReport": "weights.load_state",
    "Manifest": "weights.manifest",
    "Support": "factory.supports",
    "supports": "factory.supports",
    "list_families": "factory.supports",
    "BridgeError": "errors",
    "ConfigError": "errors",
    "MeshError": "errors",
    "MappingError": "errors",
    "CheckpointError": "errors",
    "ExportError": "errors",
    "LostRankError": "errors",
    "TargetError": "errors",
    "TransferError": "errors",
    "BatchError": "errors",
    "enable_cpu": "cpu",
}

_OF_ENGINES = {
    *("plan_buckets", "BufferRing", "Receiver", "map_engine", "EngineMap", "export_into", "EngineWriter"),
}
"""Their page is the page of ``mcore_bridge.engines``. Trainers may import them from here, too."""

_ERRORS = {name for name, home in _HOMES.items() if home == "errors" and name != "BridgeError"}
"""Their page lists the module of errors."""

__all__ = [name for name in _HOMES if name not in _OF_ENGINES | _ERRORS]


_OF_OTHERS = {
    "AutoBridge": "build_model, or AutoBridge of mcore_bridge.trainers.megatron_bridge",
    "load_model": "build_model",
    "from_pretrained": "build_model",
    "save_pretrained": "save_hf_checkpoint",
    "export_hf_weights": "iter_hf_weights",
    "can_handle": "supports",
    "list_supported_models": "list_families",
}
"""Names that other libraries have for what is here."""
_FORMER = {"iter_hf_pieces": "iter_hf_shards"}
"""Names of the release before. They are gone in the next."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value = _version()
    elif name in _FORMER:
        from mcore_bridge.arguments import warn_of_former

        warn_of_former(f"mcore_bridge.{name}", f"mcore_bridge.{_FORMER[name]}")
        return getattr(sys.modules[__name__], _FORMER[name])
    elif name in _HOMES:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_meant(name)}")
    globals()[name] = value
    return value


def _version() -> str:
    """The version that was installed: it comes from the tag of the commit. A folder that nobody installed has none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("mcore-hf")
    except PackageNotFoundError:
        return "0+not.installed"


def _meant(name: str) -> str:
    if name.startswith("_"):
        return ""
    from difflib import get_close_matches

    near = [_OF_OTHERS[name]] if name in _OF_OTHERS else get_close_matches(name, _HOMES, n=1)
    return f": do you mean {near[0]}?" if near else ""


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ERRORS})
