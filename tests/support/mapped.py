"""One rank of an engine, written by a map of its loader, beside a new model that the loader filled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import mcore_bridge as mb
from mcore_bridge.weights.engine.engine_tensors import all_tensors
from tests.support.fusions import smallest_buckets

LOOKED_AT = (1, 2, 5)
"""Rounds after which every tensor of the engine is compared."""


class Mapped(NamedTuple):
    """The kinds of maps of an engine's rank, and errors."""

    copies: int
    fills: int
    loads: int
    uncovered: list[str]
    wrong: list[str]
    """A line for each tensor with wrong bits after a round, and for each contradiction in the map."""


def fed_by_map(
    model: nn.Module,
    load: Callable[[Iterator[tuple[str, Tensor]]], object],
    models: Any,
    states: Sequence[dict[str, Tensor]],
    read: Callable[[int], nn.Module],
    quantize: Any = None,
) -> Mapped:
    """Map ``model``, then feed it each of ``states`` through the smallest buckets.

    Args:
        load: the engine's loader with all its later work.
        models: the trainer's models, which get the states one after the other.
        read: makes a model of the engine that its loader filled with the state of a round, from 1 on.
        quantize: the format in which the weights leave.
    """
    loads = 0

    def counted(pairs: Iterator[tuple[str, Tensor]]) -> None:
        nonlocal loads
        loads += 1
        load(pairs)

    plan = smallest_buckets(mb.manifest(models, quantize=quantize))
    engine = mb.map_engine(plan, model, counted)
    made, wrong = loads, engine.map.problems()
    forget(model)
    with closing(mb.BufferRing(plan, "cpu")) as ring, closing(mb.Receiver(plan, ring.handles())) as receiver:
        for number, state in enumerate(states, 1):
            mb.load_hf_weights(models, state)
            for bucket in ring.fill(
                mb.iter_hf_weights(models, quantize=quantize), acknowledged=lambda: None, in_flight=1
            ):
                receiver.copy_into(bucket.number, engine)
            receiver.finish()
            if number in LOOKED_AT:
                wrong += [f"round {number}: {name}" for name in differences(model, read(number))]
    uncovered = [f"{entry.tensor}: {entry.reason}" for entry in engine.map.uncovered]
    return Mapped(len(engine.map.copies), len(engine.map.fills), made, uncovered, wrong)


def forget(model: nn.Module) -> None:
    """Set all parameters to NaN, so that an element that is not written shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan") if parameter.is_floating_point() else -1)


def differences(one: nn.Module, other: nn.Module) -> list[str]:
    """Names of tensors whose bits differ between two models: parameters, buffers and attributes of modules."""
    mine, theirs = all_tensors(one), all_tensors(other)
    return [name for name in {**mine, **theirs} if bits(mine.get(name)) != bits(theirs.get(name))]


def bits(tensor: Tensor | None) -> object:
    """A value that is equal for tensors with equal dtype, shape and bits."""
    if tensor is None:
        return None
    if tensor.is_meta:
        return tensor.dtype, tensor.shape
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    return tensor.dtype, tensor.shape, data.numpy().tobytes()
