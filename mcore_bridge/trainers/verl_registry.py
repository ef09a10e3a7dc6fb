"""Refuses verl's functions from before it had bridges; all else of ``verl.models.mcore.registry`` stays as it is."""

from typing import Any, NoReturn

from mcore_bridge.errors import ConfigError
from mcore_bridge.trainers.module_patch import attribute_of_original


def __getattr__(name: str) -> Any:
    return attribute_of_original("verl.models.mcore.registry", name)


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
        f"verl's {name} is not served by mcore_bridge: it belongs to training with use_mbridge=False, which verl had "
        "up to 0.7.1, and to its commands converter_hf_to_mcore.py and model_merger (backend megatron). Train with "
        "use_mbridge=True; for the commands use `mcore-bridge convert`, or unset VERL_USE_EXTERNAL_MODULES"
    )
