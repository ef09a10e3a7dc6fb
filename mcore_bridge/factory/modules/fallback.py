"""Where torch's modules take the place of TransformerEngine's, a message says so."""

from __future__ import annotations

import functools
import logging

import torch

logger = logging.getLogger("mcore_bridge")


@functools.cache
def say(message: str) -> None:
    """Once, from rank 0."""
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        logger.warning(message)
