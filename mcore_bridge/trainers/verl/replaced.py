"""Replacements of verl's functions: the one for adapters, and older functions without a bridge, which are refused."""

from typing import Any, NoReturn

from mcore_bridge.errors import ConfigError
from mcore_bridge.trainers.peft_functions import Peft, create_peft


def get_peft_cls(model_config: Any, bridge: object, provider: object, dtype: Any = None) -> Peft | None:
    """The adapters that verl adds to the model when it is built; None without adapters.

    Raises:
        ConfigError: ``model_config.lora`` has unsupported settings, or the bridge is mbridge's.
    """
    lora = getattr(model_config, "lora", {})
    if lora.get("rank", 0) <= 0:
        return None
    if provider is None:
        raise ConfigError("adapters need vanilla_mbridge=False: mbridge has no functions for adapters")
    return create_peft(lora, dtype)


def hf_to_mcore_config(*arguments: object, **keywords: object) -> NoReturn:
    """Raise ``ConfigError``: use verl's bridges."""
    _refuse("hf_to_mcore_config")


def init_mcore_model(*arguments: object, **keywords: object) -> NoReturn:
    """Raise ``ConfigError``: use verl's bridges."""
    _refuse("init_mcore_model")


def get_mcore_weight_converter(*arguments: object, **keywords: object) -> NoReturn:
    """Raise ``ConfigError``: use verl's bridges."""
    _refuse("get_mcore_weight_converter")


def _refuse(name: str) -> NoReturn:
    raise ConfigError(
        f"verl's {name} is not served by mcore_bridge: it belongs to training with use_mbridge=False (verl up to "
        "0.7.1), and to verl's commands converter_hf_to_mcore.py and model_merger (backend megatron). Train with "
        "use_mbridge=True; for the commands use `mcore-bridge convert`, or unset VERL_USE_EXTERNAL_MODULES"
    )
