"""How transformers is asked to dequantize a folder, and where it cannot do so right."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from mcore_bridge.rules.scheme import Encoding
from mcore_bridge.weights.source.encoded_weights import quantization_in
from mcore_bridge.weights.source.source import open_folder

_CONFIGS = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config", "compressed-tensors": "CompressedTensorsConfig"}
"""By method, the class of transformers that takes ``dequantize=True``."""


def dequantizing(folder: Path) -> dict[str, Any]:
    """Further arguments of ``from_pretrained``, so that a quantized folder becomes a model in fp32."""
    quantization = quantization_in(folder)
    if quantization is None:
        return {}
    kind = getattr(importlib.import_module("transformers"), _CONFIGS[quantization.method])
    return {"quantization_config": kind(dequantize=True)}


def why_no_reference(folder: Path) -> str:
    """Why transformers has no right logits of a folder, the same on every rank; empty where it has."""
    source, quantization = open_folder(folder), quantization_in(folder)
    if quantization is None or not source.is_encoded:
        return ""
    transformers = importlib.import_module("transformers")
    if quantization.method not in _CONFIGS:
        return f"transformers does not read weights of {quantization.method}"
    if quantization.method == "compressed-tensors" and importlib.util.find_spec("compressed_tensors") is None:
        return "transformers needs the package compressed-tensors for these weights"
    if quantization.method != "mxfp4" and transformers.__version__.startswith("4."):
        return f"transformers {transformers.__version__} does not dequantize these weights without a GPU"
    edges = [name for name in source if (held := source.stored(name).encoding) and _has_edges(held)]
    if edges and quantization.method == "fp8":
        return f"transformers decodes blocks at an edge otherwise, as those of {edges[0]} (docs/guide/quantized.md)"
    return ""


def _has_edges(held: Encoding) -> bool:
    """Whether there is a block that a weight ends in."""
    sizes = [held.shape[dim] for dim in held.order]
    return any(size % block and size > block for size, block in zip(sizes, held.codec.block, strict=True))
