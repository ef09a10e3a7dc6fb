"""The tensors of an engine by their names: parameters, buffers, and tensors in other attributes of its modules.

Their addresses are not kept. An engine that sleeps, wakes or loads anew may have moved its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from mcore_bridge.weights.plan.engine_map import EngineTensor

Tensors = Mapping[str, Tensor]
Source = nn.Module | Callable[[], Tensors]
"""An engine's model, or a function that returns its tensors by name as they are now."""


def all_tensors(source: Source) -> dict[str, Tensor]:
    """Every tensor of the engine: first its parameters and buffers, then attributes of its modules."""
    if not isinstance(source, nn.Module):
        return dict(source())
    modules = dict(source.named_modules())
    tensors = {}
    for held in ("_parameters", "_buffers", "__dict__"):
        for prefix, module in modules.items():
            for name, value in vars(module).items() if held == "__dict__" else getattr(module, held).items():
                if isinstance(value, Tensor):
                    tensors[f"{prefix}.{name}" if prefix else name] = value
    return tensors


def tensors_named(source: Source, names: Iterable[str]) -> dict[str, Tensor]:
    """The engine's tensors with these names, without the names that it lacks."""
    if not isinstance(source, nn.Module):
        held = source()
        return {name: held[name] for name in names if name in held}
    tensors = {}
    for name in names:
        owner: object = source
        for part in name.split("."):
            owner = getattr(owner, part, None)
        if isinstance(owner, Tensor):
            tensors[name] = owner
    return tensors


def plainly() -> AbstractContextManager[None]:
    """Within it, a subclass of Tensor is asked as any tensor: those of vLLM answer several times more slowly."""
    return torch._C.DisableTorchFunctionSubclass()


def described(name: str, tensor: Tensor) -> EngineTensor:
    """Shape, strides and dtype of ``tensor``."""
    return EngineTensor(name, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def octets(tensor: Tensor) -> Tensor:
    """The memory of ``tensor`` from its first element to its last, uint8 [bytes]."""
    item = tensor.element_size()
    num_bytes = described("", tensor).span * item
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), tensor.storage_offset() * item, (num_bytes,), (1,))


def hosts(tensors: Tensors) -> dict[str, tuple[str, int]]:
    """The names whose memory lies within that of another tensor, which is the host.

    If two tensors have the same memory, the first is the host of the second.

    Returns:
        For each such name: the name of its host, and the place of its first element there.
    """
    by_storage: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel() and not tensor.is_meta:
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    inside = {}
    for names in by_storage.values():
        if len(names) == 1:
            continue
        spans = {name: _span(tensors[name]) for name in names}
        chosen: list[str] = []
        for name in sorted(names, key=lambda name: spans[name][0] - spans[name][1]):  # the largest first
            start, end = spans[name]
            item = tensors[name].element_size()
            for host in chosen:
                first, last = spans[host]
                if first <= start and end <= last and item == tensors[host].element_size():
                    inside[name] = (host, (start - first) // item)
                    break
            else:
                chosen.append(name)
    return inside


def _span(tensor: Tensor) -> tuple[int, int]:
    item = tensor.element_size()
    start = int(tensor.storage_offset()) * item
    return start, start + described("", tensor).span * item
