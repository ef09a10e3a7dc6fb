"""Warnings about modules of torch that are used instead of TransformerEngine's."""

from __future__ import annotations

import functools
import logging

import torch

logger = logging.getLogger("mcore_bridge")


@functools.cache
def say(message: str) -> None:
    """Log the warning once, on rank 0."""
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        logger.warning(message)
