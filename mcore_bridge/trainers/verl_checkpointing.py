"""Replaces the function of Megatron-Bridge's checkpoints that verl calls; other names stay Megatron-Bridge's own."""

from typing import Any

from mcore_bridge.trainers.adapters import apply_peft_adapter_filter_to_state_dict
from mcore_bridge.trainers.module_patch import attribute_of_original

__all__ = ["apply_peft_adapter_filter_to_state_dict"]


def __getattr__(name: str) -> Any:
    return attribute_of_original("megatron.bridge.training.checkpointing", name)
