"""Replaces Megatron-Bridge's settings of data parallelism for verl; all other names stay Megatron-Bridge's own."""

from typing import Any

from mcore_bridge.trainers.megatron_bridge import create_ddp_config
from mcore_bridge.trainers.module_patch import attribute_of_original

__all__ = ["create_ddp_config"]


def __getattr__(name: str) -> Any:
    return attribute_of_original("megatron.bridge.training.utils.config_utils", name)
