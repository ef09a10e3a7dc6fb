"""The adapters of a model in HF names, whole on every rank, by the plans and messages of weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from torch import Tensor

from mcore_bridge.errors import ConfigError
from mcore_bridge.weights.agreement import open_export
from mcore_bridge.weights.bound import Models, chunks_of
from mcore_bridge.weights.transfer.executor import run_program


def iter_hf_adapters(models: Models) -> Iterator[tuple[str, Tensor]]:
    """Yield each ``lora_A`` and ``lora_B``, whole, on every rank: same names, order, shapes and bits.

    The adapters of experts that HF holds in one tensor come as one too, ``[experts, rank, in]`` and
    ``[experts, out, rank]``. All ranks of a model replica iterate together.

    Args:
        models: this rank's chunks with adapters, wrapped or not.

    Raises:
        ConfigError: they have no adapters.
        ExportError: on every rank of the group, when any of them fails.
    """
    adapters = getattr(chunks_of(models)[0], "bridge_adapters", None)
    if adapters is None:
        raise ConfigError("models must have adapters, found none: call add_adapters first")
    export = open_export(models, None, "lm", adapters=adapters.mapping)
    with closing(run_program(export.program, export.group, export.bound.tensors)) as pairs:
        yield from pairs
