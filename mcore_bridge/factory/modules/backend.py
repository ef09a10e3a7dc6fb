"""The two backends of a model, "te" and "torch", and helpers for the functions that adapt layer specs and chunks.

``say`` logs a warning once, for example if torch's modules replace TransformerEngine's.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from mcore_bridge.errors import ConfigError

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

Backend = Literal["torch", "te"]


class Selection:
    """The keys that the latest indexer of a pipeline stage has hidden, for layers that have none.

    Attributes:
        hidden: for each packed sequence, or for all rows together, ``[b, 1 or heads of this TP rank, queries of this CP
            rank, all keys]``.
    """

    def __init__(self) -> None:
        self.hidden: list[Tensor] = []


@dataclass(frozen=True)
class LayerContext:
    """What a function that adapts the spec of a layer may read.

    Attributes:
        config: the config of the layer, with the attributes of ``config.overrides.ATTRIBUTES``.
        number: the number of the layer in the whole model, from 0.
        backend: the backend of the layer's modules.
        selection: the selection that the layers of a pipeline stage share.
    """

    config: TransformerConfig
    number: int
    backend: Backend
    selection: Selection = field(default_factory=Selection)


def choose_backend(backend: str, *, device: torch.device) -> Backend:
    """The backend to use. "auto" becomes "te" if TransformerEngine is installed and ``device`` is CUDA, else "torch".

    Raises:
        ConfigError: ``backend`` is not one of "auto", "te", "torch", or is "te" and TransformerEngine is not installed.
    """
    if backend not in ("auto", "te", "torch"):
        raise ConfigError(f'backend must be "auto", "te" or "torch", found {backend!r}: pass one of them')
    is_installed = has_transformer_engine()
    if backend == "te" and not is_installed:
        raise ConfigError('backend "te" needs transformer_engine, which is not installed: install it, or use "torch"')
    if backend == "auto":
        return "te" if is_installed and device.type == "cuda" else "torch"
    return "te" if backend == "te" else "torch"


def has_transformer_engine() -> bool:
    """Whether TransformerEngine is installed."""
    return importlib.util.find_spec("transformer_engine") is not None


def require_quantizable(overrides: Mapping[str, object], backend: Backend, device: torch.device) -> None:
    """Raises ``ConfigError`` if an override wants parameters in FP8, which only TransformerEngine's modules have."""
    if overrides.get("fp8_param") and backend != "te" and device.type != "meta":
        raise ConfigError(
            f'fp8_param needs the backend "te" on a GPU, found "{backend}" on {device}: install transformer_engine, or '
            "remove fp8_param"
        )


def kernels_of(backend: Backend) -> dict[str, object]:
    """Config fields that choose the fast kernels of a backend for experts. Results do not change."""
    from megatron.core.utils import is_te_min_version

    return {"moe_grouped_gemm": backend == "te", "moe_permute_fusion": backend == "te" and is_te_min_version("2.1.0")}


def norm_of(backend: Backend, config: Any = None) -> type:
    """The norm of a backend, for places in which it is not fused into a linear layer.

    TransformerEngine's LayerNorm always has a bias, and its norms always have a weight. Its backward fails if a norm
    holds other modules, such as connections of residual streams. Configs with ``norm_bias=False``,
    ``norm_weight=False`` or ``enable_mhc_connections=True`` therefore get torch's norms on either backend.
    """
    if not getattr(config, "norm_weight", True):
        from mcore_bridge.factory.modules.torch_modules import UnitNorm

        return UnitNorm
    has_streams = getattr(config, "enable_mhc_connections", False)
    if backend == "te" and getattr(config, "norm_bias", True) and not has_streams:
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm
    from mcore_bridge.factory.modules.torch_modules import Norm

    return Norm


def separate_norm(layer: Any, context: LayerContext) -> None:
    """Takes the norm before attention out of its projection.

    Either other modules of attention read the normed input, too, or megatron-core knows no norm in this projection.
    """
    if context.backend == "te":
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

        layer.self_attention.submodules.linear_qkv = TEColumnParallelLinear
        layer.input_layernorm = norm_of(context.backend, context.config)


def submodules_of(spec: Any) -> Any:
    """The submodules of an MLP's spec: a partial function in megatron-core 0.19, a ``ModuleSpec`` before."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules


def with_module(spec: Any, change: Callable[[type], type]) -> Any:
    """The spec of an MLP, or of experts, with its class changed: a partial function or a ``ModuleSpec``, as above.

    The partial function is of a class, or of a method of a class that makes an object.
    """
    if isinstance(spec, functools.partial):
        made_by: Any = spec.func
        is_method = inspect.ismethod(made_by)
        made_by = getattr(change(made_by.__self__), made_by.__name__) if is_method else change(made_by)
        return functools.partial(made_by, *spec.args, **spec.keywords)
    spec.module = change(spec.module)
    return spec


@functools.cache
def mixed(mixin: type, module: type) -> type:
    """The class of a module with a mixin before it. Cached, so that equal arguments give one class."""
    return type(f"{mixin.__name__}Of{module.__name__}", (mixin, module), {"__doc__": mixin.__doc__})


class ChangesOutput(nn.Module):
    """A mixin for a linear layer, or for all experts of a layer, with a forward hook that changes its output.

    The hook of an adapter runs before it, so the adapter belongs to the layer without this change.
    """


def unchanged(module: type) -> type:
    """The class of a layer without a mixin that changes its output. Other classes are returned unchanged."""
    return module.__bases__[1] if issubclass(module, ChangesOutput) else module


def is_unrotated(config: Any, number: int) -> bool:
    """Whether layer ``number`` (from 0) has no rope."""
    return bool(config.no_rope_freq and config.no_rope_freq[number])


logger = logging.getLogger("mcore_bridge")


@functools.cache
def say(message: str) -> None:
    """Log the warning once, on rank 0."""
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        logger.warning(message)


def read_tokens(chunk: GPTModel, read: Callable[[Tensor, Tensor], None]) -> None:
    """Call ``read`` behind the embedding of a chunk, with its tokens ``[b, s]`` and with what it returns."""

    def hook(embedding: Any, inputs: tuple[Any, ...], named: dict[str, Any], embedded: Tensor) -> None:
        read(named["input_ids"] if "input_ids" in named else inputs[0], embedded)

    chunk.embedding.register_forward_hook(hook, with_kwargs=True)


def require_tokens(tokens: Tensor | None, reason: str) -> Tensor:
    """What a forward has made of its tokens. Raises ``ConfigError`` with the reason for which layers need it."""
    if tokens is None:
        raise ConfigError(
            f"a forward must embed its tokens in this model, because {reason}; found embeddings from outside "
            "(decoder_input). Pass input_ids alone"
        )
    return tokens


def free_after_forward(module: nn.Module, holders: Sequence[Any], **empty: object) -> None:
    """Set these attributes of ``holders`` behind each forward of a module, also if it fails."""

    def free(*arguments: object) -> None:
        for holder in holders:
            for name, value in empty.items():
                setattr(holder, name, value)

    if holders:
        module.register_forward_hook(free, always_call=True)
