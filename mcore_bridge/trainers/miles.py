"""The bridge that miles takes for Megatron-Bridge's: its exports yield the name of a parameter with each tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from mcore_bridge.trainers import megatron_bridge
from mcore_bridge.trainers.conversion_tasks import ConversionTask
from mcore_bridge.weights.model_chunks import adapters_of
from mcore_bridge.weights.peft.peft_config import PREFIX

__all__ = ["AutoBridge"]


class AutoBridge(megatron_bridge.AutoBridge):
    """The bridge of ``mcore_bridge.trainers.megatron_bridge`` with the triples of miles."""

    def export_hf_weights(
        self,
        model: megatron_bridge.Models,
        cpu: bool = False,
        show_progress: bool = True,
        conversion_tasks: Iterable[ConversionTask | None] | None = None,
        merge_adapter_weights: bool = True,
        *,
        with_megatron_names: bool = True,
    ) -> Iterator[tuple[str, Tensor, str]]:
        """Yield HF tensors like the class above, each with the global name of a parameter of which it was made.

        Args:
            model, cpu, show_progress, conversion_tasks, merge_adapter_weights: as there.
            with_megatron_names: without effect.

        Yields:
            The HF name, the tensor, and the name of the parameter; of a tensor of all experts, the first parameter.
        """
        options: dict[str, Any] = {"conversion_tasks": conversion_tasks, "merge_adapter_weights": merge_adapter_weights}
        weights = super().export_hf_weights(model, cpu, show_progress, **options, with_megatron_names=True)
        return ((sourced.param_name, sourced.weight, sourced.megatron_param_names[0]) for sourced in weights)

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
