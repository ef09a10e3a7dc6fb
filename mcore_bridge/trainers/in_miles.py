"""Importing this module makes miles use mcore_bridge in the place of Megatron-Bridge, in this process."""

from collections.abc import Iterator

from torch import Tensor

from mcore_bridge.trainers import megatron_bridge
from mcore_bridge.trainers.module_patch import MEGATRON_BRIDGE, replace_modules
from mcore_bridge.weights.peft.hf_adapters import adapters_of
from mcore_bridge.weights.peft.peft_config import PREFIX

replace_modules(MEGATRON_BRIDGE | {"megatron.bridge": "mcore_bridge.trainers.in_miles"})


class AutoBridge(megatron_bridge.AutoBridge):
    """The bridge with exports of adapters as in miles's fork of Megatron-Bridge."""

    def export_adapter_weights(  # type: ignore[override]
        self, model: megatron_bridge.Models, cpu: bool = False, show_progress: bool = True
    ) -> Iterator[tuple[str, Tensor, str]]:
        """Like the method of the base, with names without PEFT's prefix, each with the canonical name of a parameter.

        Yields:
            The name, the tensor, and the canonical name; of a tensor of all experts, its own name.
        """
        mapping = adapters_of(model).mapping
        for name, tensor in super().export_adapter_weights(model, cpu, show_progress):
            plain = name.removeprefix(PREFIX)
            yield plain, tensor, next(iter(mapping.consumers(plain)), plain)
