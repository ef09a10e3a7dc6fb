"""The base class of mixers in the place of attention: they have attention's call arguments, and a linear layer at each
end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from einops import rearrange
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the usual name)

from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.torch_modules import packed_lengths

try:
    from megatron.core.ssm.utils import _split_tensor_factory
except ImportError:  # megatron-core 0.16
    from megatron.core.ssm.gated_delta_net import _split_tensor_factory

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig


@dataclass
class MixerSubmodules:
    """The linear layers of a mixer."""

    in_proj: Any
    out_proj: Any


def submodules_for(backend: str, *, normed: bool = True) -> MixerSubmodules:
    """The linear layers of a backend. With backend te, the norm before the mixer is in ``in_proj`` if ``normed``."""
    if backend == "te":
        from megatron.core.extensions import transformer_engine as te

        column = te.TELayerNormColumnParallelLinear if normed else te.TEColumnParallelLinear
        return MixerSubmodules(column, te.TERowParallelLinear)
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    return MixerSubmodules(ColumnParallelLinear, RowParallelLinear)


def all_convolved(texts: Sequence[Tensor], convolve: Callable[[Tensor], Tensor], size: int) -> list[Tensor]:
    """The causal convolution of each text ``[s, b, n]``, all at once, with zeros before each.

    Args:
        texts: packed sequences, or rows.
        convolve: the convolution of ``[b, n, s]`` without padding.
        size: the size of its kernel, in tokens.
    """
    past = size - 1
    joined = torch.cat([F.pad(rearrange(text, "s b n -> b n s"), (past, 0)) for text in texts], dim=-1)
    convolved = rearrange(F.pad(convolve(joined), (0, past)), "b n s -> s b n")
    return [piece[: len(piece) - past] for piece in convolved.split([len(text) + past for text in texts])]


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

    def _all_convolved(self, texts: Sequence[Tensor]) -> list[Tensor]:
        """The causal convolution ``conv1d`` of each text ``[s, b, n]``, all at once, with zeros before each."""
        conv1d: Any = self.conv1d
        return all_convolved(texts, conv1d, conv1d.kernel_size[0])

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


class OwnMixer(Mixer, MegatronModule):
    """A mixer that megatron-core lacks. A subclass makes its modules in ``_make``."""

    instead = "export the weights to an engine"

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MixerSubmodules,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: Any,  # mcore 0.19 also passes name, cp_comm_type and pp_layer_offset
    ) -> None:
        super().__init__(config)
        assert pg_collection is not None
        self.layer_number, self.tp_group, self.cp_group = layer_number, pg_collection.tp, pg_collection.cp
        self._make(config, submodules)

    def _make(self, config: TransformerConfig, submodules: MixerSubmodules) -> None:
        """Makes the modules and parameters, when the groups of ranks are known."""
        raise NotImplementedError


def sharded_mixer(
    mixer: Any,
    own: Sequence[str],
    parts: Mapping[str, Mapping[str, int]],
    prefix: str,
    sharded_offsets: tuple[Any, ...],
    metadata: Any,
) -> dict[str, Any]:
    """The ``sharded_state_dict`` of a mixer, whose own parameters are cut along dim 0.

    Args:
        mixer: the module, with its linear layers as ``in_proj`` and ``out_proj``.
        own: the names of its own parameters; names that it lacks have no effect.
        parts: parameters that join parts, each of which is cut separately, with this rank's rows of each part.
        prefix: the prefix of all keys.
        sharded_offsets: as megatron-core passes them.
        metadata: as megatron-core passes them.
    """
    parameters = dict(mixer.named_parameters())
    cut = {name: parameters[name] for name in own if name in parameters}
    tensors: dict[str, Any] = make_sharded_tensors_for_checkpoint(cut, prefix, dict.fromkeys(cut, 0), sharded_offsets)
    for name in ("in_proj", "out_proj"):
        linear = getattr(mixer, name)
        tensors |= sharded_state_dict_default(linear, f"{prefix}{name}.", sharded_offsets, metadata)
    for name, rows in parts.items():
        tensors[prefix + name] = _split_tensor_factory(tensors[prefix + name], [*rows.values()], [*rows], 0)
    return tensors
