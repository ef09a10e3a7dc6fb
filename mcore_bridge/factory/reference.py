"""Runs a model with adapters as if it had none. Most trainers use this base as the reference policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mcore_bridge.errors import ConfigError
from mcore_bridge.weights.model_chunks import Models, chunks_of
from mcore_bridge.weights.peft.hf_adapters import switch_of


@contextmanager
def without_adapters(models: Models) -> Iterator[None]:
    """Make every forward of ``models`` in the block run the base alone.

    A recompute uses adapters exactly if its forward did, wherever the backward runs. For this, the switch is one of the
    random states, which megatron-core restores for a recompute. Blocks may be nested. All ranks of a replica enter it
    together. CUDA graphs keep what they captured.

    Args:
        models: this rank's chunks with adapters, wrapped or not.

    Raises:
        ConfigError: the models have no adapters, so the policy would be its own reference.

    Example:
        >>> with mb.without_adapters(policy), torch.no_grad():
        ...     reference = mb.forward(policy, input_ids, attention_mask).log_probs
        >>> torch.equal(reference, mb.forward(models, input_ids, attention_mask).log_probs)
        True
    """
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from mcore_bridge.factory.modules.adapter import Adapter

    chunks = chunks_of(models)
    if not hasattr(chunks[0], "bridge_adapters"):
        raise ConfigError("models must have adapters, found none: the policy would be its own reference")
    switch = switch_of(chunks[0].bridge_adapters)
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, Adapter):
            module.switch = switch
    was_off = switch in get_cuda_rng_tracker().states_
    get_cuda_rng_tracker().states_[switch] = torch.get_rng_state()
    try:
        yield
    finally:
        if not was_off:
            get_cuda_rng_tracker().states_.pop(switch, None)
