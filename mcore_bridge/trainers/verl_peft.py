"""Replaces verl's use of Megatron-Bridge for adapters."""

from typing import Any

from mcore_bridge.errors import ConfigError
from mcore_bridge.trainers.adapters import Peft, create_peft


def get_peft_cls(model_config: Any, bridge: object, provider: object, dtype: Any = None) -> Peft | None:
    """What verl adds to the model when it is built; None without adapters.

    Raises:
        ConfigError: ``model_config.lora`` asks for what adapters here are not, or the bridge is mbridge's.
    """
    lora = getattr(model_config, "lora", {})
    if lora.get("rank", 0) <= 0:
        return None
    if provider is None:
        raise ConfigError("adapters need vanilla_mbridge=False: mbridge has no calls for them")
    return create_peft(lora, dtype)
