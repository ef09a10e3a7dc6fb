"""Computes transformers' logits of a folder as a reference, or gives the reason why there is no reference."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_bridge.architecture import composite_of, read_hf
from mcore_bridge.batches.images import BLOCKS, TYPES, token_types
from mcore_bridge.commands import text
from mcore_bridge.commands.verify.constant_weights import Alike
from mcore_bridge.commands.verify.random_image import Shown
from mcore_bridge.config.class_names import class_in, model_class
from mcore_bridge.config.hf import is_borrowed
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.machine import free_memory
from mcore_bridge.rules.scheme import Encoding
from mcore_bridge.weights.source.encoded_weights import quantization_in
from mcore_bridge.weights.source.source import open_folder
from mcore_bridge.weights.transfer.collectives import Group

_CONFIGS = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config", "compressed-tensors": "CompressedTensorsConfig"}
"""By method, the class of transformers that takes ``dequantize=True``."""
_USABLE = 0.8
"""The fraction of the free memory that we use."""
_BYTES = 4  # of an fp32 number


def why_no_reference(folder: Path, adapter: Path | None = None) -> str:
    """The reason why transformers, or ``peft``, has no right logits of a folder; "" if it has. Equal on every rank."""
    hf = read_hf(folder)
    if is_borrowed(type(hf)):
        return f"no reference for logits, as the installed transformers has no model of {hf.model_type}"
    if (composite := composite_of(hf)) is not None and composite.without_reference:
        return composite.without_reference
    if adapter is not None and importlib.util.find_spec("peft") is None:
        return "no reference for logits with an adapter, as peft is not installed: pip install 'mcore-hf[peft]'"
    return _why_not_decoded(folder)


def _why_not_decoded(folder: Path) -> str:
    """The reason why transformers decodes the weights of a folder differently; an empty string if it does not."""
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
    stacks = [name for name in source if (held := source.stored(name).encoding) and len(held.shape) > 2]
    if stacks and quantization.method == "fp8":  # up to 5.24; see Fp8Dequantize.convert
        return f"transformers leaves out the scales of stacks of experts without a GPU, as of {stacks[0]}"
    return ""


def _has_edges(held: Encoding) -> bool:
    """Whether there is a block that a weight ends in."""
    sizes = [held.shape[dim] for dim in held.order]
    return any(size % block and size > block for size, block in zip(sizes, held.codec.block, strict=True))


def shortage(num_parameters: int, dims: ParallelDims, device: str) -> str:
    """Why a model in fp32 does not fit into memory; "" if it fits. The answer is the same on every rank."""
    world, free = Group(None), free_memory()
    replicas = math.ceil(world.size / (dims.tp * dims.pp)) if device == "cpu" else 1
    need = num_parameters * _BYTES * replicas
    short = "" if need < _USABLE * free else f"{text.num_bytes(need)} of memory, {text.num_bytes(free)} are free"
    if device == "cuda":
        here = num_parameters * _BYTES // (dims.tp * dims.pp)
        free = torch.cuda.mem_get_info()[0]
        if here > _USABLE * free:
            short = f"{text.num_bytes(here)} of each GPU, {text.num_bytes(free)} are free on one"
    said = world.all_gather_object(short)
    return next((f"the model in fp32 needs {short}" for short in said if short), "")


def reference_logits(folder: Path, alike: Alike, batch: Shown, device: str, adapter: Path | None, head: str) -> Tensor:
    """The logits of transformers, or of ``peft`` with an adapter, in fp32 on CPU; hidden states without a head.

    They are computed on this rank's GPU if the model fits there.
    """
    from transformers import AutoConfig

    output = "last_hidden_state" if head == "none" else "logits"
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    of_family = _class_of(folder, config, head)
    named = {TYPES, BLOCKS}.intersection(inspect.signature(of_family.forward).parameters)
    model = of_family.from_pretrained(
        None,
        config=config,
        state_dict=alike.tensors(folder),
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
        trust_remote_code=False,
        **_dequantizing(folder),
    )
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapter))
    model = model.float().eval()  # transformers decodes some formats to bf16
    if device == "cuda":
        size = sum(parameter.nbytes for parameter in model.parameters())
        device = "cuda" if size < _USABLE * torch.cuda.mem_get_info()[0] else "cpu"
    model = model.to(device)
    with torch.no_grad():
        rows = batch.input_ids.split(1)
        inputs = [_inputs(config, row, batch.of_row(number), named, device) for number, row in enumerate(rows)]
        pairs = zip(rows, inputs, strict=True)
        return torch.cat([getattr(model(row.to(device), **own), output).float().cpu() for row, own in pairs])


def _inputs(
    config: Any, row: Tensor, images: dict[str, Tensor], named: Iterable[str], device: str
) -> dict[str, Tensor]:
    """The inputs of a row's images for transformers, with the types of tokens by the names that transformers has."""
    if not images:
        return {}
    types = dict.fromkeys(named, token_types(config, row))
    return {name: value.to(device) for name, value in {**images, **types}.items()}


def _class_of(folder: Path, config: Any, head: str) -> Any:
    """The class of transformers that computes logits: for a composite, the one that its config names."""
    import transformers
    from transformers.models.auto.auto_factory import _get_model_class

    if head == "none":
        return _get_model_class(config, transformers.AutoModel._model_mapping)
    if composite_of(read_hf(folder)) is None:
        return _get_model_class(config, transformers.AutoModelForCausalLM._model_mapping)
    names = class_in(config) or [str(model_class(config.model_type))]
    return getattr(transformers, names[0])


def _dequantizing(folder: Path) -> dict[str, Any]:
    """Further arguments of ``from_pretrained``, so that a quantized folder becomes a model in fp32."""
    quantization = quantization_in(folder)
    if quantization is None:
        return {}
    kind = getattr(importlib.import_module("transformers"), _CONFIGS[quantization.method])
    return {"quantization_config": kind(dequantize=True)}
