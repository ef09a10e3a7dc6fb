"""Short causal convolutions beside a residual: of keys and values, and of the outputs of attention and MLP.

Each token of a channel gets a weighted sum of its last few tokens, in fp32. Every TP rank holds the weights of all
channels. Keys and values have the channels of their heads on each rank. Behind attention and MLP, with sequence
parallelism, ranks exchange their tokens of all channels for all tokens of some channels, and back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import all_to_all_hp2sp, all_to_all_sp2hp, copy_to_tensor_model_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the usual name)

from mcore_bridge.factory.modules.backend import LayerContext, mixed, separate_norm, submodules_of
from mcore_bridge.factory.modules.mixers.mixer import all_convolved
from mcore_bridge.factory.modules.torch_modules import gather_text, own_text, packed_lengths, placement
from mcore_bridge.factory.modules.values import OwnProjection

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatron.core.transformer import TransformerConfig

    from mcore_bridge.factory.modules.multipliers import Add


def adapt_convolutions(layer: Any, context: LayerContext) -> None:
    """Put convolutions into attention and into both additions of a layer, by ``residual_convolutions`` of its config.

    ``short_conv_kernel`` is the size of the kernel, in tokens.
    """
    if not getattr(context.config, "residual_convolutions", False):
        return
    config, text, attention = context.config, Text(), layer.self_attention
    separate_norm(layer, context)
    attention.module = mixed(ConvolvedKeys, attention.module)
    attention.params = {**(attention.params or {}), "text": text}
    is_dense = not hasattr(submodules_of(layer.mlp), "router")
    layer.self_attn_bda = ModuleSpec(ConvolvedSum, {"config": config, "text": text})
    layer.mlp_bda = ModuleSpec(ConvolvedSum, {"config": config, "text": text, "scaled": is_dense})


class Text:
    """What attention knows of the tokens of a layer, for the additions behind attention and MLP in one forward.

    No addition is computed again without attention: megatron-core recomputes a whole layer, or parts that have none.
    """

    packed: Any = None
    counting: Tensor | None = None
    """1 for tokens and 0 for padding, ``[b, s]``, if a mask says it. Padding does not reach tokens behind it."""

    def note(self, attention_mask: Tensor | None, packed: Any) -> None:
        """Take what attention gets, and a mask if it has two dims as in transformers."""
        is_padded = attention_mask is not None and attention_mask.dim() == 2
        self.packed, self.counting = packed, attention_mask if is_padded else None


class CausalConv(nn.Module):
    """A causal convolution of each channel, in fp32. Each packed sequence begins with zeros before it.

    Args:
        config: the config of the model.
        channels: the number of channels, over all TP ranks.
        kernel: how many tokens it sums.
        distance: how many tokens they are apart.
        sequence_parallel: whether megatron-core sums the gradient of the weights over TP.
    """

    def __init__(
        self, config: Any, channels: int, kernel: int, *, distance: int = 1, sequence_parallel: bool = False
    ) -> None:
        super().__init__()
        self.distance, self.past = distance, (kernel - 1) * distance
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel, **placement(config)))
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def convolved(self, tokens: Tensor, first: int, text: Text, *, copied: bool) -> Tensor:
        """fp32 ``[s, b, n]``, from the tokens of this CP rank in n channels from ``first`` on.

        ``copied``: the gradient of the weights is a part on each TP rank, and the backward sums it.
        """
        cp_group = parallel_state.get_context_parallel_group()
        whole = copy_to_tensor_model_parallel_region(self.weight) if copied else self.weight
        weight = whole[first : first + tokens.size(-1)].float()
        exact, packed = tokens.float(), text.packed
        shown = exact if text.counting is None else exact * text.counting.t().unsqueeze(-1)
        parts = shown.split(packed_lengths(packed, cp_group.size())) if packed else [shown]
        texts = all_convolved(
            [gather_text(part, cp_group) for part in parts],
            lambda channels: F.conv1d(channels, weight, groups=len(weight), dilation=self.distance),
            self.past + 1,
        )
        return torch.cat([own_text(text, cp_group) for text in texts])


class ResidualConv(CausalConv):
    """A causal convolution of each channel, added to its input."""

    def __init__(self, config: Any, channels: int, *, sequence_parallel: bool) -> None:
        super().__init__(config, channels, config.short_conv_kernel, sequence_parallel=sequence_parallel)
        if config.perform_initialization:
            nn.init.uniform_(self.weight, -(bound := config.short_conv_kernel**-0.5), bound)

    def forward(self, tokens: Tensor, first: int, text: Text, *, copied: bool) -> Tensor:
        """``[s, b, n]``, as ``convolved``."""
        return (tokens.float() + self.convolved(tokens, first, text, copied=copied)).to(tokens.dtype)


class ConvolvedKeys(OwnProjection):
    """Attention with a convolution of keys before their norm, and one of values."""

    def __init__(self, *places: Any, config: TransformerConfig, text: Text, **arguments: Any) -> None:
        super().__init__(*places, config=config, **arguments)
        assert config.kv_channels
        assert config.num_query_groups
        self.text, self.value_width = text, config.kv_channels
        channels = config.num_query_groups * config.kv_channels
        self.k_conv = ResidualConv(config, channels, sequence_parallel=False)
        self.v_conv = ResidualConv(config, channels, sequence_parallel=False)

    def forward(
        self, hidden: Tensor, attention_mask: Tensor | None, *, packed_seq_params: Any = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """As in megatron-core."""
        self.text.note(attention_mask, packed_seq_params)
        outputs: tuple[Tensor, Tensor | None] = super().forward(
            hidden, attention_mask, packed_seq_params=packed_seq_params, **options
        )
        return outputs

    def _finished(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = self._rank * self.config.num_query_groups // self.world_size * self.value_width
        key, value = (
            conv(heads.flatten(-2), first, self.text, copied=True).view_as(heads)
            for conv, heads in ((self.k_conv, key), (self.v_conv, value))
        )
        return super()._finished(query, key, value)


class ConvolvedSum(nn.Module):
    """The addition behind attention or MLP, of a convolved output. A number of the checkpoint may scale the output."""

    def __init__(self, config: Any, text: Text, *, scaled: bool = False) -> None:
        super().__init__()
        self.text, self.sequence_parallel = text, config.sequence_parallel
        self.conv = ResidualConv(config, config.hidden_size, sequence_parallel=config.sequence_parallel)
        self.scale = nn.Parameter(torch.ones(1, **placement(config))) if scaled else None
        if self.scale is not None:
            self.scale.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, training: bool, fused: bool) -> Add:
        """The addition, as megatron-core's ``get_bias_dropout_add`` returns it."""
        from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

        plain: Add = get_bias_dropout_add(training, fused)

        def add(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, probability: float) -> Tensor:
            output, bias = output_with_bias
            output = output if bias is None else output + bias
            output = output if self.scale is None else output * self.scale.to(output.dtype)
            return plain((self._convolved(output), None), residual, probability)

        return add

    def _convolved(self, output: Tensor) -> Tensor:
        return by_channels(
            output,
            lambda channels, first: self.conv(channels, first, self.text, copied=False),
            sequence_parallel=self.sequence_parallel,
        )


def by_channels(tokens: Tensor, convolve: Callable[[Tensor, int], Tensor], *, sequence_parallel: bool) -> Tensor:
    """The convolution of ``[s, b, n]``, with sequence parallelism of the tokens of this TP rank.

    ``convolve`` gets all tokens of some channels, and the number of the first channel.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    if not sequence_parallel or group.size() == 1:
        return convolve(tokens, 0)
    channels = all_to_all_sp2hp(tokens, group=group).unflatten(0, (-1, tokens.size(1)))
    convolved = convolve(channels, group.rank() * channels.size(-1))
    return all_to_all_hp2sp(convolved, group=group).view_as(tokens)
