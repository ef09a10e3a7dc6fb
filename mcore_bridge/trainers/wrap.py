"""Prepare chunks for training: frozen routers, half precision, data parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mcore_bridge.errors import ConfigError
from mcore_bridge.weights.transfer.quantized_parameters import is_quantized

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig

_ROUTER = (".mlp.router.weight", ".mlp.router.bias", ".mlp.shared_experts.gate_weight")


def freeze_routers(chunks: Sequence[nn.Module]) -> None:
    """Disable the gradients of routers and of the gates of shared experts, if the model has any."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name.endswith(_ROUTER):
                parameter.requires_grad_(False)


def require_value_head(chunks: Sequence[Any]) -> None:
    """Raise ``ConfigError`` unless these chunks were built with a value head."""
    for chunk in chunks:
        if chunk.bridge.head != "value":
            raise ConfigError(
                f"the model must have been built for a value head, found head {chunk.bridge.head!r}: pass "
                "make_value_model to the bridge before it builds, or use build_model(head='value')"
            )


def ddp_config_of(settings: Mapping[str, object]) -> DistributedDataParallelConfig:
    """megatron-core's settings of data parallelism.

    Raises:
        ConfigError: megatron-core has no such setting, or it is one of Megatron-FSDP, which has no chunks to export.
    """
    from megatron.core.distributed import DistributedDataParallelConfig

    if settings.get("use_megatron_fsdp") or settings.get("use_custom_fsdp"):
        raise ConfigError("use_megatron_fsdp must be False: its parameters are no shards of our meshes. Use DDP.")
    try:
        return DistributedDataParallelConfig(**settings)
    except TypeError as error:
        raise ConfigError(f"megatron-core refuses these settings of data parallelism: {error}") from error


def wrap(chunks: Sequence[Any], ddp_config: DistributedDataParallelConfig | None) -> list[nn.Module]:
    """Wrap chunks for a trainer's schedules: in ``Float16Module`` if their config says so, and in megatron-core's DDP.

    Args:
        chunks: bare chunks by virtual stage. Parameters must be frozen already.
        ddp_config: None means no data parallelism, for models that are not trained.

    Raises:
        ConfigError: an optimizer would never write parameters in FP8.
    """
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes

    _require_written(chunks, ddp_config)
    for chunk in chunks:
        for parameter in chunk.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    config = chunks[0].config
    wrapped = [_half(chunk) for chunk in chunks] if config.fp16 or config.bf16 else list(chunks)
    if ddp_config is None:
        return wrapped
    return [
        DistributedDataParallel(config, ddp_config, module, disable_bucketing=number > 0)
        for number, module in enumerate(wrapped)
    ]


def _require_written(chunks: Sequence[nn.Module], ddp_config: DistributedDataParallelConfig | None) -> None:
    """Raise if a distributed optimizer would leave parameters in FP8 as they are, as megatron-core's 0.19 may."""
    if ddp_config is None or not ddp_config.use_distributed_optimizer or ddp_config.fp8_param_gather:
        return
    if any(is_quantized(parameter) for chunk in chunks for parameter in chunk.parameters()):
        raise ConfigError(
            "fp8_param_gather must be True for parameters in FP8 (fp8_param), found False: a distributed optimizer "
            "would train its masters and never write the parameters. Set it in the settings of DDP."
        )


def _half(chunk: Any) -> nn.Module:
    """Wrap a chunk in ``Float16Module``, which casts all tensors; tensors with another dtype on purpose keep it.

    So the biases of routers stay fp32: updates of them are too small for bf16.
    """
    from megatron.core.transformer.module import Float16Module

    holders = [holder for module in chunk.modules() for holder in (module._parameters, module._buffers)]
    kept = [
        (holder, name, tensor, tensor.data)
        for holder in holders
        for name, tensor in holder.items()
        if tensor is not None and tensor.is_floating_point() and tensor.dtype != chunk.config.params_dtype
    ]
    wrapped: nn.Module = Float16Module(chunk.config, chunk)
    with torch.no_grad():
        for holder, name, tensor, data in kept:
            tensor.data = data
            holder[name] = tensor
    return wrapped
