"""The base class of mixers in the place of attention: they have attention's call arguments, and a linear layer at each
end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.torch_modules import packed_lengths

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


class Mixer(nn.Module):
    """A causal mixer with sequence and context parallelism, for packed sequences and for rows. It keeps no state.

    With context parallelism, every rank computes the recurrence over the whole text, and keeps its own tokens.
    """

    instead: ClassVar[str]
    """Advice for callers who need a state."""
    in_proj: Any
    out_proj: Any
    cp_group: Any
    tp_group: Any

    def _sequences(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Everything between ``in_proj`` and ``out_proj``: for each sequence from ``[s, b, n]`` to ``[s, b, n]``."""
        raise NotImplementedError

    def _entering(self, layer: Any, config: TransformerConfig, size: int) -> Any:
        """The linear layer from hidden states to ``size`` numbers, over all TP ranks."""
        return build_module(
            layer,
            config.hidden_size,
            size,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **self._shared(config),
        )

    def _leaving(self, layer: Any, config: TransformerConfig, size: int) -> Any:
        """The linear layer from ``size`` numbers, over all TP ranks, to hidden states."""
        return build_module(
            layer,
            size,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **self._shared(config),
        )

    def _shared(self, config: TransformerConfig) -> dict[str, Any]:
        return {"config": config, "is_expert": False, "bias": False, "tp_group": self.tp_group}

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        *,
        inference_params: Any = None,
        **unused: Any,  # arguments of attention, such as the rope
    ) -> tuple[Tensor, Tensor | None]:
        """Mix in all earlier tokens.

        Args:
            hidden_states: ``[s, b, h]``, the tokens of this CP rank (with SP, of this TP rank).
            attention_mask: ignored, since the recurrence is always causal.
            inference_context: must be None.
            packed_seq_params: the starts of packed sequences; each begins with an empty state.
            inference_params: must be None.

        Returns:
            ``[s, b, h]``, and no bias.
        """
        if inference_context is not None or inference_params is not None:
            raise ConfigError(
                f"inference_context must be None for {type(self).__name__}, which keeps no state: {self.instead}"
            )
        mixed, _ = self.in_proj(hidden_states)
        parts = mixed.split(packed_lengths(packed_seq_params, self.cp_group.size())) if packed_seq_params else [mixed]
        out: tuple[Tensor, Tensor | None] = self.out_proj(torch.cat(self._sequences(parts)))
        return out
