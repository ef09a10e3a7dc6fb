"""A gated short convolution in the place of attention, in torch on any device. megatron-core has no such module.

Its channels are dealt to the TP ranks. Each channel reads only its own few earlier tokens.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from mcore_bridge.factory.modules.mixers.mixer import MixerSubmodules, OwnMixer, sharded_mixer, submodules_for
from mcore_bridge.factory.modules.torch_modules import gather_text, own_text, placement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron.core.transformer import TransformerConfig


def short_conv_spec(backend: str) -> ModuleSpec:
    """The spec of a short convolution. With backend te, the norm before it is in ``in_proj``."""
    return ModuleSpec(ShortConv, submodules=submodules_for(backend))


class ShortConv(OwnMixer):
    """``out_proj(C * convolved(B * x))``, where ``in_proj`` gives B, C and x, each as wide as the hidden states."""

    def _make(self, config: TransformerConfig, submodules: MixerSubmodules) -> None:
        self.channels = config.hidden_size // self.tp_group.size()
        self.in_proj = self._entering(submodules.in_proj, config, 3 * config.hidden_size)
        self.conv1d = self._convolution(config)
        self.out_proj = self._leaving(submodules.out_proj, config, config.hidden_size)

    def _convolution(self, config: Any) -> nn.Conv1d:
        """Makes the convolution. Each rank draws other values, since it has other channels."""
        channels, drawn = self.channels, config.perform_initialization
        with get_cuda_rng_tracker().fork() if drawn else contextlib.nullcontext():
            size = config.short_conv_kernel
            conv1d = nn.Conv1d(channels, channels, size, groups=channels, bias=False, **placement(config))
        weight: Any = conv1d.weight
        weight.tensor_model_parallel, weight.partition_dim = True, 0
        return conv1d

    def _sequences(self, parts: Sequence[Tensor]) -> list[Tensor]:
        gates = [part.chunk(3, dim=-1) for part in parts]
        texts = [gather_text(before * x, self.cp_group) for before, _, x in gates]
        convolved = [own_text(text, self.cp_group) for text in self._all_convolved(texts)]
        return [after * text for (_, after, _), text in zip(gates, convolved, strict=True)]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """The tensors of the mixer for a checkpoint of megatron-core, in which B, C and x are cut separately."""
        parts = {"in_proj.weight": dict.fromkeys("BCx", self.channels)}
        return sharded_mixer(self, ("conv1d.weight",), parts, prefix, sharded_offsets, metadata)
