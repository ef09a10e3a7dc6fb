"""Replaces verl's use of Megatron-Bridge for adapters, which are refused by name."""

from typing import Any

from mcore_bridge.trainers.megatron_bridge import refuse_adapters


def get_peft_cls(model_config: Any, bridge: object, provider: object, dtype: object = None) -> None:
    """Return None, which means no adapters in verl.

    Raises:
        ConfigError: ``model_config.lora`` asks for some.
    """
    if getattr(model_config, "lora", {}).get("rank", 0) > 0:
        refuse_adapters()
