"""Multi-latent attention as in transformers, on either backend, also as sparse attention with an indexer.

megatron-core's classes compute it, except for three things. The norms of latents have a separate epsilon. Every TP rank
holds the down projections whole. The part of the keys that all heads share gets the gradients of all heads.

Sparse attention attends to the tokens that an indexer selects for each query ("dsa" of megatron-core 0.19). It is
computed in plain torch unless fused kernels are requested.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, copy_to_tensor_model_parallel_region
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor, nn

from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.backend import LayerContext, say
from mcore_bridge.factory.modules.torch_modules import Norm, placement

if TYPE_CHECKING:
    from megatron.core.transformer import MLATransformerConfig

    from mcore_bridge.factory.modules.backend import Backend


def adapt_latent(layer: Any, context: LayerContext) -> None:
    """Puts our latent attention into a layer's spec, if the model has latents. Norms are not fused into linears."""
    config, backend = context.config, context.backend
    if not config.multi_latent_attention:
        return
    if getattr(config, "mla_down_proj_fusion", False):
        raise ConfigError(
            "mla_down_proj_fusion must be False, found True: no rule maps the fused weight. Remove the override."
        )

    norm = latent_norm(backend)
    layer.self_attention.module = LatentAttention
    attention = layer.self_attention.submodules
    if backend == "torch":  # in TransformerEngine's spec the down projections are already replicated
        attention.linear_q_down_proj = attention.linear_kv_down_proj = ReplicatedLinear
    attention.linear_q_up_proj = attention.linear_kv_up_proj = attention.linear_q_proj
    attention.q_layernorm = IdentityOp if config.q_lora_rank is None else norm
    attention.kv_layernorm = norm


@functools.cache
def latent_norm(backend: Backend) -> type:
    """The norm of a latent. Its epsilon is ``config.latent_norm_epsilon``, not the one that mcore passes."""
    if backend == "torch":
        return LatentNorm
    from megatron.core.extensions.transformer_engine import TENorm

    class LatentTENorm:
        """Makes a norm of TransformerEngine. As with mcore's ``TENorm``, the constructor returns another class."""

        def __new__(cls, config: MLATransformerConfig, hidden_size: int, eps: float = 1e-5, **arguments: Any) -> Any:
            return TENorm(config=config, hidden_size=hidden_size, eps=config.latent_norm_epsilon, **arguments)

    return LatentTENorm


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
        return torch.cat((latent, read_by_heads(rotated, self.tp_group)), dim=-1), bias


def read_by_heads(shared: Tensor, tp_group: Any) -> Tensor:
    """``shared``, which heads of all TP ranks read. The backward sums gradients over TP."""
    read: Tensor = copy_to_tensor_model_parallel_region(shared, group=tp_group)
    if read.requires_grad:
        read.register_hook(Tensor.contiguous)  # for other gradients mcore returns the unreduced original
    return read


def adapt_sparse(layer: Any, context: LayerContext) -> None:
    """Puts sparse attention into a layer's spec, with the modules of our latent attention, if the model has it."""
    config, backend = context.config, context.backend
    if config.experimental_attention_variant != "dsa":
        return
    _require_no_recompute(config)
    if backend == "te":
        say("TransformerEngine has no sparse attention: megatron-core computes it in torch")
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttentionSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    from mcore_bridge.factory.modules.sparse_modules import SparseLatentAttention

    latent = layer.self_attention.submodules
    names = {field.name for field in dataclasses.fields(AbsorbedMLASelfAttentionSubmodules)} - {"core_attention"}
    shared = {name: getattr(latent, name) for name in names}
    layer.self_attention = ModuleSpec(
        module=SparseLatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=AbsorbedMLASelfAttentionSubmodules(core_attention=_core(latent, backend), **shared),
    )


def _core(latent: Any, backend: Backend) -> Any:
    from megatron.core.transformer.experimental_attention_variant.dsa import (
        DSAIndexer,
        DSAIndexerSubmodules,
        DSAttention,
        DSAttentionSubmodules,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec

    from mcore_bridge.factory.modules.backend import norm_of

    whole = latent.linear_kv_down_proj
    indexer = DSAIndexerSubmodules(
        linear_wq_b=whole, linear_wk=whole, k_norm=norm_of(backend), linear_weights_proj=whole
    )
    return ModuleSpec(
        module=DSAttention,
        submodules=DSAttentionSubmodules(indexer=ModuleSpec(module=DSAIndexer, submodules=indexer)),
    )


def _require_no_recompute(config: Any) -> None:
    """Raises ``ConfigError`` if attention is recomputed and layers share selections.

    mcore keeps only the selections of the latest forward, so selections of another microbatch would be used.
    """
    granularity = config.recompute_granularity
    recomputed = granularity == "full" or (granularity == "selective" and "core_attn" in config.recompute_modules)
    if recomputed and config.dsa_indexer_topk_freq > 1:
        raise ConfigError(
            "attention must not be recomputed in a model whose layers share selections, found recompute_granularity="
            f"{granularity!r}, recompute_modules={config.recompute_modules}: megatron-core no longer has the "
            "selection in the recompute. Recompute other modules."
        )
