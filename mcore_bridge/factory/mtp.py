"""Multi-token prediction (MTP): layers after the decoder, each around a decoder layer, in any pipeline stage."""

from __future__ import annotations

import dataclasses
import zlib
from typing import TYPE_CHECKING, Any

import torch

from mcore_bridge.factory.modules.backend import Backend, norm_of
from mcore_bridge.weights.model_tensors import held_tensors

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


def mtp_block_spec(layer_spec: Any, num_layers: int, *, backend: Backend) -> Any:
    """megatron-core's spec of ``num_layers`` MTP layers, each around ``layer_spec``; None for no layers."""
    if num_layers == 0:
        return None
    from megatron.core.transformer import ModuleSpec
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlockSubmodules,
        MultiTokenPredictionLayer,
        MultiTokenPredictionLayerSubmodules,
    )

    names = {field.name for field in dataclasses.fields(MultiTokenPredictionLayerSubmodules)}
    inner = "mtp_model_layer" if "mtp_model_layer" in names else "transformer_layer"  # 0.19 and before
    norm = norm_of(backend)
    others: dict[str, Any] = {"enorm": norm, "hnorm": norm, "layer_norm": norm, "eh_proj": _linear(backend)}
    submodules = MultiTokenPredictionLayerSubmodules(**{inner: layer_spec}, **others)
    return MultiTokenPredictionBlockSubmodules(
        layer_specs=[ModuleSpec(module=MultiTokenPredictionLayer, submodules=submodules)] * num_layers
    )


def _linear(backend: Backend) -> type:
    if backend == "te":
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

        return TEColumnParallelLinear
    from megatron.core.tensor_parallel import ColumnParallelLinear

    return ColumnParallelLinear


def initialise_mtp(chunk: GPTModel, seed: int) -> None:
    """Draw initial values for MTP layers, which a checkpoint may lack: identity norms, and N(0, init_method_std).

    Values depend on ``seed``, on the name and, for shards, on the rank. So replicas are equal.
    """
    centre = 0.0 if chunk.config.layernorm_zero_centered_gamma else 1.0
    for name, tensor in held_tensors([chunk]).items():
        if not name.startswith("mtp.") or tensor.is_meta:
            continue
        if tensor.dim() == 1:
            tensor.detach().fill_(centre if name.endswith("norm.weight") else 0.0)
            continue
        groups = chunk.pg_collection
        split = getattr(tensor, "tensor_model_parallel", False) or ".experts." in name
        place = (groups.expt_tp if ".experts." in name else groups.tp).rank() if split else 0
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name} {place}".encode()))
        drawn = torch.randn(tensor.shape, generator=generator) * chunk.config.init_method_std
        tensor.detach().copy_(drawn)
