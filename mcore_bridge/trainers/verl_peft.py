"""Where verl has Megatron-Bridge make adapters: refused by name, whether that is installed or not."""

from typing import Any

from mcore_bridge.trainers.megatron_bridge import refuse_adapters


def get_peft_cls(model_config: Any, bridge: object, provider: object, dtype: object = None) -> None:
    """None, as verl has it for models without adapters.

    Raises:
        ConfigError: ``model_config.lora`` asks for some.
    """
    if getattr(model_config, "lora", {}).get("rank", 0) > 0:
        refuse_adapters()
