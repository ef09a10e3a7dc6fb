"""Replaces Megatron-Bridge's functions for adapters that verl calls; all other names stay Megatron-Bridge's own."""

from typing import Any

from mcore_bridge.trainers.adapters import create_peft, create_peft_hook, load_peft_adapter_checkpoint
from mcore_bridge.trainers.module_patch import attribute_of_original

__all__ = ["create_peft", "create_peft_hook", "load_peft_adapter_checkpoint"]


def __getattr__(name: str) -> Any:
    return attribute_of_original("megatron.bridge.peft.utils", name)
