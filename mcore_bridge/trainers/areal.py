"""Importing this module makes AReaL's ``bridge_type="megatron-bridge"`` use mcore_bridge, in this process.

AReaL's updates of engines use its own converters. ``convert_to_hf`` takes their place.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from mcore_bridge.errors import ConfigError
from mcore_bridge.trainers import slime
from mcore_bridge.trainers.module_patch import MEGATRON_BRIDGE, replace_modules

replace_modules(MEGATRON_BRIDGE)


def convert_to_hf(
    tf_config: Any,
    model_name: str,
    name: str,
    param: Tensor,
    quantization_config: Mapping[str, Any] | None = None,
    fp8_direct_convert: bool = False,
    hf_config: Any = None,
) -> list[tuple[str, Tensor]]:
    """HF names and tensors of one parameter, with AReaL's signature; otherwise as slime's ``convert_to_hf``.

    Args:
        tf_config: the config of the model, of which ``mtp_num_layers`` is read.
        model_name: without effect.
        name, param, quantization_config: as there.
        fp8_direct_convert: must be False.
        hf_config: the HF config, which AReaL has given the path of its folder.

    Raises:
        ConfigError, ExportError, MappingError: as there; or ``fp8_direct_convert`` is True, or the path is missing.
    """
    folder = getattr(hf_config, "_name_or_path", "")
    if fp8_direct_convert or not folder:
        raise ConfigError(
            "expected fp8_direct_convert=False and an hf_config with a path, found "
            f"{fp8_direct_convert} and {folder!r}: train with bf16 parameters, and keep AReaL's hf_config"
        )
    args = SimpleNamespace(hf_checkpoint=folder, mtp_num_layers=tf_config.mtp_num_layers)
    return slime.convert_to_hf(args, model_name, name, param, quantization_config)
