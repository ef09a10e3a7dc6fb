"""The tower of a composite: transformers' model of images and text, without its language model.

A model of the first stage has it as ``vision``. It is equal on all tensor-parallel ranks.

Published files may store the queries, keys and values of a tower in one weight, for which transformers has three
layers. transformers also orders the rows of each head differently: it rotates halves of a head, and the published code
rotates neighbouring dims.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.functional import linear

from mcore_bridge.composite import TRANSFORMERS, text_of
from mcore_bridge.errors import ConfigError
from mcore_bridge.rules.spec import TowerSpec

if TYPE_CHECKING:
    from mcore_bridge.composite import Whole


def require_tower(whole: Whole | None, vision: str) -> None:
    """Raise ``ConfigError`` unless the models of images of this composite can be built."""
    import transformers

    if vision == "text_only":
        return
    if vision not in ("train", "frozen"):
        raise ConfigError(f"vision must be 'train', 'frozen' or 'text_only', found {vision!r}: pass one of them")
    if whole is None:
        raise ConfigError(
            f"vision must be 'text_only' for a model of text, found {vision!r}: it has no model of images. "
            "Leave vision= out"
        )
    kind = whole.composite.model_type
    if reason := whole.composite.without_tower:
        raise ConfigError(f"vision must be 'text_only' for {kind}, found {vision!r}: {reason}")
    if getattr(text_of(whole.config, whole.composite), "hidden_size_per_layer_input", None):
        raise ConfigError(
            f"vision must be 'text_only' for this {kind}, found {vision!r}: its layers have inputs that are embedded "
            "from tokens (hidden_size_per_layer_input), and a forward with images passes embeddings alone"
        )
    if transformers.__version__ in whole.composite.broken_in:
        raise ConfigError(
            f"{kind} needs another release of transformers with vision={vision!r}, found {transformers.__version__}, "
            "whose own class of this composite fails in every forward. Install another release, or pass "
            "vision='text_only'"
        )
    if Version(transformers.__version__) < Version(TRANSFORMERS):
        raise ConfigError(
            f"{kind} needs transformers {TRANSFORMERS} or later with vision={vision!r}, found "
            f"{transformers.__version__}: earlier releases compute positions inside the language model. Install "
            f"transformers>={TRANSFORMERS}, or pass vision='text_only'"
        )


def build_tower(whole: Whole, *, dtype: torch.dtype, device: torch.device, initialise: bool = False) -> nn.Module:
    """Build transformers' composite with ``TextStub`` in the place of its language model.

    Args:
        whole: the composite.
        dtype: the dtype of all parameters. Buffers, such as the frequencies of ropes, keep their dtype, also in later
            casts.
        device: the device of parameters and buffers; "meta" gives a tower without storage.
        initialise: draw random values for the parameters like transformers, from torch's current seed. Otherwise
            parameters are not initialised, and a load must follow.

    Returns:
        The base model of the composite, such as ``Qwen3_5Model``. Its ``config`` is a copy of ``whole.core``.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModel

    from mcore_bridge.factory.vision.text_stub import TextStub

    config = copy.deepcopy(whole.core)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    text = config.text_config
    kinds = getattr(text, "layer_types", None) or [None]
    needed = 1 + max(kinds.index(kind) for kind in set(kinds))  # its layers are discarded, but Gemma 4 needs each kind
    num_layers, text.num_hidden_layers = text.num_hidden_layers, needed
    with init_empty_weights(include_buffers=False):
        tower: nn.Module = AutoModel.from_config(config, dtype=torch.float32)
        tower.language_model = TextStub(tower.language_model)  # type: ignore[arg-type]
        if whole.composite.joined_qkv:
            join_qkv(tower, whole.composite.joined_qkv)
    text.num_hidden_layers = num_layers
    for module in tower.modules():
        _store(module, dtype, device)
    if initialise and device.type != "meta":
        for module in tower.modules():
            module._is_hf_initialized = False  # type: ignore[assignment]  # else transformers skips it
        tower.initialize_weights()  # type: ignore[operator]
    _mark(tower)
    tower._apply = partial(_apply, tower)  # type: ignore[method-assign]
    tower._set_gradient_checkpointing = partial(_checkpoint, tower)  # type: ignore[assignment]
    return tower


def tower_specs(whole: Whole, dtype: torch.dtype) -> tuple[TowerSpec, ...]:
    """The parameters and persistent buffers of a tower, with their names in memory."""
    tower = build_tower(whole, dtype=dtype, device=torch.device("meta"))
    # attention of torch reads the weight of a subclass of its linear layer
    linear = {f"{name}.weight" for name, module in tower.named_modules() if type(module) is nn.Linear}
    joined = f".{whole.composite.joined_qkv}.weight"
    return tuple(
        TowerSpec(name, tuple(tensor.shape), tensor.dtype, name in linear and not name.endswith(joined))
        for name, tensor in tower.state_dict().items()
    )


def _store(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give the parameters of a module storage, and move its buffers."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        held = torch.empty(parameter.shape, dtype=dtype, device=device)
        module.register_parameter(name, nn.Parameter(held, requires_grad=parameter.requires_grad))
    for name, buffer in list(module.named_buffers(recurse=False)):
        module._buffers[name] = buffer.to(device)


def _apply(tower: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """``nn.Module._apply``, but buffers keep their dtype: ``Float16Module`` would round frequencies."""
    buffers = [
        (module._buffers, name, buffer) for module in tower.modules() for name, buffer in module._buffers.items()
    ]
    type(tower)._apply(tower, change, recurse)
    for held, name, buffer in buffers:
        if buffer is not None and (now := held[name]) is not None and now.dtype != buffer.dtype:
            held[name] = buffer.to(now.device)
    return tower


def _checkpoint(tower: nn.Module, **options: Any) -> None:
    """``_set_gradient_checkpointing`` of transformers, by which a tower recomputes its layers in the backward.

    Reentrant checkpointing would set gradients of parameters itself, and not in the order that reducers expect. A
    recompute finds megatron-core's random states as they were in its forward, since adapters read some of them.
    """
    if getattr(options.get("gradient_checkpointing_func"), "keywords", {}).get("use_reentrant"):
        raise ConfigError(
            "use_reentrant must be False for a tower, found True: it would add gradients of parameters twice. Leave "
            "it out"
        )
    if options.get("enable", True) and (function := options.get("gradient_checkpointing_func")) is not None:
        options["gradient_checkpointing_func"] = partial(function, context_fn=_same_states)
    made: Any = type(tower)
    made._set_gradient_checkpointing(tower, **options)


def _same_states() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of a forward, and of its recompute, which has megatron-core's random states of now."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    kept = tracker.get_states()

    @contextmanager
    def again() -> Iterator[None]:
        before = tracker.get_states()
        tracker.set_states({**kept})
        try:
            yield
        finally:
            tracker.set_states(before)

    return nullcontext(), again()


def _mark(tower: nn.Module) -> None:
    """Mark parameters for megatron-core: each is whole on every tensor-parallel rank.

    So norms of gradients count it once. These ranks have equal gradients, except for the order of sums in kernels;
    their mean keeps replicas equal.
    """
    for parameter in tower.parameters():
        parameter.tensor_model_parallel, parameter.partition_dim = False, -1  # type: ignore[attr-defined]
        parameter.average_gradients_across_tp_domain = True  # type: ignore[attr-defined]


_NAMES = ("q_proj", "k_proj", "v_proj")


class JoinedPart(nn.Module):
    """A layer whose weight and bias are the rows of one third of a joined layer.

    Args:
        joined: the layer with the parameters.
        index: the index of the third.
        num_heads: the number of heads, if neighbours in them are rotated; else None.
    """

    def __init__(self, joined: nn.Linear, index: int, num_heads: int | None) -> None:
        super().__init__()
        self._joined = (joined,)  # in a tuple: it is no submodule
        self._index, self._num_heads = index, num_heads

    @property
    def weight(self) -> Tensor:
        """The weight, as transformers has it."""
        return self._rows(self._joined[0].weight)

    @property
    def bias(self) -> Tensor:
        """The bias, as transformers has it."""
        return self._rows(self._joined[0].bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        return linear(hidden, self.weight, self.bias)

    def _rows(self, joined: Tensor) -> Tensor:
        rows = joined.chunk(len(_NAMES))[self._index]
        if self._num_heads is None:
            return rows
        return rows.unflatten(0, (self._num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def join_qkv(tower: nn.Module, name: str) -> None:
    """Replace the query, key and value layers of each attention by parts of one layer, named ``name``."""
    attentions: list[Any] = [module for module in tower.modules() if all(hasattr(module, part) for part in _NAMES)]
    for attention in attentions:
        size = attention.q_proj.in_features
        joined = nn.Linear(size, sum(getattr(attention, part).out_features for part in _NAMES))
        setattr(attention, name, joined)
        for index, part in enumerate(_NAMES):
            setattr(attention, part, JoinedPart(joined, index, None if part == "v_proj" else attention.num_heads))
