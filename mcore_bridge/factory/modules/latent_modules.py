"""The modules of latent attention: mcore's class with the modules of its spec, and a norm and a linear in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, copy_to_tensor_model_parallel_region
from megatron.core.transformer import multi_latent_attention
from torch import Tensor, nn

from mcore_bridge.factory.modules.torch_modules import Norm, placement

if TYPE_CHECKING:
    from megatron.core.transformer import MLATransformerConfig


class LatentNorm(Norm):
    """RMSNorm with ``config.latent_norm_epsilon``."""

    def __init__(self, config: MLATransformerConfig, hidden_size: int, eps: float = 1e-5, **arguments: Any) -> None:
        super().__init__(config, hidden_size, config.latent_norm_epsilon, **arguments)


class _LikeColumns(type):
    """A metaclass whose classes compare equal to ``ColumnParallelLinear``.

    mcore's latent attention looks up the class of a down projection in a fixed list, and builds the entry that it
    finds.
    """

    def __eq__(cls, other: object) -> bool:
        return other is ColumnParallelLinear or super().__eq__(other)

    __hash__ = type.__hash__


class ReplicatedLinear(nn.Module, metaclass=_LikeColumns):
    """A linear layer that every TP rank holds whole. With SP, each rank applies it to its own tokens.

    mcore's own spec in torch cuts down projections, which needs a ``tp`` that divides the sizes of latents.
    """

    # mcore passes further arguments that describe this kind of layer.
    def __init__(self, input_size: int, output_size: int, config: MLATransformerConfig, **arguments: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, input_size, **placement(config)))
        # finalize_model_grads sums the gradients of parameters with this attribute over TP.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if config.perform_initialization:
            config.init_method(self.weight)

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """The output, and None for the bias, like mcore's linear layers."""
        return nn.functional.linear(hidden, self.weight), None


class LatentAttention(multi_latent_attention.MLASelfAttention):
    """mcore's latent attention, always with the norms of its spec."""

    def __init__(self, config: MLATransformerConfig, submodules: Any, *arguments: Any, **keywords: Any) -> None:
        if not isinstance(
            multi_latent_attention.TELinear, type
        ):  # without TE, mcore 0.16 takes a stand-in for the class
            multi_latent_attention.HAVE_TE = False
        super().__init__(config, submodules, *arguments, **keywords)
        if self.tp_group.size() > 1 and not config.sequence_parallel:  # with SP, mcore's gather sums them
            self.linear_kv_down_proj.register_forward_hook(self._sum_gradient_of_rotated)

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """The modules of the spec. mcore 0.19 itself would choose norms by ``qk_layernorm``."""
        projections = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
        return {name: getattr(submodules, name) for name in (*projections, "q_layernorm", "kv_layernorm")}

    def _sum_gradient_of_rotated(self, linear: nn.Module, inputs: Any, outputs: tuple[Tensor, None]) -> Any:
        """Sums the gradients of the rotated keys over TP: all heads share these, and a rank has only its own heads."""
        combined, bias = outputs
        latent, rotated = combined.split((self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim), dim=-1)
        rotated = copy_to_tensor_model_parallel_region(rotated, group=self.tp_group)
        if rotated.requires_grad:
            rotated.register_hook(Tensor.contiguous)  # for other gradients mcore returns the unreduced original
        return torch.cat((latent, rotated), dim=-1), bias
