"""Importing this module makes SkyRL use mcore_bridge in the place of Megatron-Bridge, in this process."""

from collections.abc import Iterator

from torch import Tensor

from mcore_bridge.trainers import megatron_bridge
from mcore_bridge.trainers.module_patch import MEGATRON_BRIDGE, replace_modules
from mcore_bridge.weights.peft.peft_config import PREFIX

replace_modules(MEGATRON_BRIDGE | {"megatron.bridge": "mcore_bridge.trainers.skyrl"})


class AutoBridge(megatron_bridge.AutoBridge):
    """The bridge with names of adapters as SkyRL expects them."""

    def export_adapter_weights(
        self, model: megatron_bridge.Models, cpu: bool = False, show_progress: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Like the method of the base, without the prefix of PEFT's names, which SkyRL adds."""
        pairs = super().export_adapter_weights(model, cpu, show_progress)
        return ((name.removeprefix(PREFIX), tensor) for name, tensor in pairs)
