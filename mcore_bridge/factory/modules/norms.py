"""Norms in other places than mcore has them: behind the output projections, over all heads at once, after the rope.

What a config asks for it says by ``norm_placement`` and ``qk_norm_kind``; without these, specs stay as they are.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar

from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor, nn

from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.backend import Backend, norm_of, submodules_of
from mcore_bridge.factory.modules.fallback import say
from mcore_bridge.factory.modules.torch_modules import Norm, sharded_tensors

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


def adapt_norm_placement(layer: Any, config: TransformerConfig, backend: Backend) -> None:
    """Norms behind attention and MLP ("sandwich"), and only there ("post").

    Args:
        layer: the submodules of a layer, changed in place.
        config: its ``norm_placement`` is "pre" (mcore's own, as without the attribute), "post" or "sandwich".
        backend: whose modules the layer has.
    """
    placement = getattr(config, "norm_placement", "pre")
    if placement == "pre":
        return
    attention, mlp = layer.self_attention.submodules, submodules_of(layer.mlp)
    norm = norm_of(backend)
    attention.linear_proj = post_normed(attention.linear_proj, norm)
    mlp.linear_fc2 = post_normed(mlp.linear_fc2, norm)
    if placement == "post":
        layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
        if backend == "te":  # whose linear layers would norm what they are given
            from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

            attention.linear_qkv = mlp.linear_fc1 = TEColumnParallelLinear


def adapt_query_key_norms(layer: Any, config: TransformerConfig, backend: Backend) -> None:
    """Norms of queries and keys that are not mcore's.

    Args:
        layer: the submodules of a layer, changed in place.
        config: its ``qk_norm_kind`` is "head" (mcore's own, as without the attribute), "all_heads" (one norm over all
            heads together) or "after_rope" (each head, rotated). ``qk_layernorm`` must be set, by which mcore knows
            that the gradients of ``q_layernorm`` and ``k_layernorm`` are to be summed over the TP ranks.
        backend: whose modules the layer has.
    """
    kind, attention = getattr(config, "qk_norm_kind", "head"), layer.self_attention.submodules
    if kind == "all_heads":
        if backend == "te":
            say("TransformerEngine has no norm over the heads of several ranks: those of queries and keys are torch's")
        attention.q_layernorm, attention.k_layernorm = QueryNorm, KeyNorm
    elif kind == "after_rope":
        attention.q_layernorm = attention.k_layernorm = IdentityOp
        attention.core_attention = normed_after_rope(attention.core_attention, norm_of(backend))


@functools.cache
def post_normed(linear: type, norm: type) -> type:
    """``linear``, an output projection, with ``norm`` behind it."""
    return type(f"PostNormed{linear.__name__}", (PostNorm, linear), {"norm": norm, "__doc__": PostNorm.__doc__})


class PostNorm(nn.Module):
    """An output projection that norms what it gives: after the reduction over TP and after its bias."""

    norm: ClassVar[type]

    def __init__(self, *sizes: int, config: TransformerConfig, **arguments: Any) -> None:
        super().__init__(*sizes, config=config, **arguments)
        self.post_layernorm = self.norm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, *inputs: Any, **options: Any) -> tuple[Tensor, None]:
        output, bias = super().forward(*inputs, **options)
        return self.post_layernorm(output if bias is None else output + bias), None


class AllHeadsNorm(Norm):
    """RMSNorm of all heads together, in mcore's slot for a norm of each.

    Every TP rank holds the weight of all heads and uses the part of its own. So its gradient is zero in the other
    parts, and the sum over ranks, which mcore makes for parameters of these names, is the whole.
    """

    heads: ClassVar[str]

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        self.num_heads, self.head_dim = getattr(config, self.heads), hidden_size
        super().__init__(config, self.num_heads * hidden_size, eps)
        if not self.rms:
            raise ConfigError(f"normalization must be RMSNorm to norm all heads together, not {config.normalization!r}")

    def forward(self, hidden: Tensor) -> Tensor:
        """``[..., heads of this rank, dim]``."""
        group = parallel_state.get_tensor_model_parallel_group()
        held = hidden.size(-2)
        squares = hidden.float().square().sum((-2, -1), keepdim=True)
        if group.size() > 1:  # summed on the way back as well: each rank's output depends on all ranks' heads
            squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        heads_summed = held * group.size()  # more than there are where ranks share a key head
        first = group.rank() * self.num_heads // group.size()
        weight = self.weight.view(self.num_heads, self.head_dim)[first : first + held]
        return self.scaled(hidden, squares / (heads_summed * self.head_dim), weight)


class QueryNorm(AllHeadsNorm):
    """Over all query heads."""

    heads = "num_attention_heads"


class KeyNorm(AllHeadsNorm):
    """Over all key heads."""

    heads = "num_query_groups"


@functools.cache
def normed_after_rope(core_attention: type, norm: type) -> type:
    """``core_attention`` with a ``norm`` of each head of queries and keys in front of it."""
    name = f"NormedAfterRope{core_attention.__name__}"
    return type(name, (NormAfterRope, core_attention), {"norm": norm, "__doc__": NormAfterRope.__doc__})


class NormAfterRope(nn.Module):
    """Attention that norms the queries and keys that it is given, which are rotated already."""

    norm: ClassVar[type]

    def __init__(self, config: TransformerConfig, *places: Any, **arguments: Any) -> None:
        super().__init__(config, *places, **arguments)
        self.q_layernorm = self.norm(config, config.kv_channels, eps=config.layernorm_epsilon)
        self.k_layernorm = self.norm(config, config.kv_channels, eps=config.layernorm_epsilon)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *masks: Any, **options: Any) -> Tensor:
        attended: Tensor = super().forward(self.q_layernorm(query), self.k_layernorm(key), value, *masks, **options)
        return attended

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """For a checkpoint of megatron-core, whose own attention has no norms in it and says nothing of them."""
        return sharded_tensors(self, prefix, sharded_offsets)
