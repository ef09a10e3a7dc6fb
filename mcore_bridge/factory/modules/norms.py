"""Norms that megatron-core lacks: after output projections, over all heads at once, after the rope.

A config requests them by ``norm_placement``, ``expert_norm`` and ``qk_norm_kind``. Without these attributes, specs stay
unchanged.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any, ClassVar

from megatron.core import parallel_state
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor, nn

from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.modules.backend import (
    Backend,
    ChangesOutput,
    LayerContext,
    is_unrotated,
    norm_of,
    say,
    submodules_of,
    with_module,
)
from mcore_bridge.factory.modules.torch_modules import Norm, UnitNorm, sharded_tensors

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig


def adapt_norm_placement(layer: Any, context: LayerContext) -> None:
    """Puts norms after attention and MLP, or after all experts, by ``norm_placement`` of the layer's config.

    It is "pre" (the default; mcore's own), "post" (no norms before attention and MLP) or "sandwich" (both).
    """
    config, backend = context.config, context.backend
    placement = getattr(config, "norm_placement", "pre")
    if placement == "pre":
        return
    attention, mlp = layer.self_attention.submodules, submodules_of(layer.mlp)
    norm = norm_of(backend, config)
    attention.linear_proj = post_normed(attention.linear_proj, norm)
    is_sparse = _has_experts(layer)
    if is_sparse:
        _norm_experts(layer, norm)
    else:
        mlp.linear_fc2 = post_normed(mlp.linear_fc2, norm)
    if placement == "post":
        _norm_before(layer, IdentityOp, backend)


def adapt_unweighted_norms(layer: Any, context: LayerContext) -> None:
    """Puts norms without weights before attention and MLP, if ``norm_weight`` of the layer's config is False."""
    if getattr(context.config, "norm_weight", True):
        return
    _norm_before(layer, UnitNorm, context.backend)


def _norm_before(layer: Any, norm: type, backend: Backend) -> None:
    """Puts ``norm`` before attention and MLP, and takes linear layers of TransformerEngine without a norm inside."""
    layer.input_layernorm = layer.pre_mlp_layernorm = norm
    if backend == "te":
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

        layer.self_attention.submodules.linear_qkv = TEColumnParallelLinear
        if not _has_experts(layer):
            submodules_of(layer.mlp).linear_fc1 = TEColumnParallelLinear


def norm_mixer(layer: Any, context: LayerContext, *, holds_norm: bool) -> None:
    """Puts a norm after a mixer in the place of attention, if norms are sandwiched, and leaves one norm before it.

    With backend te, a mixer that ``holds_norm`` has the norm before it inside.
    """
    if context.backend == "te" and holds_norm:
        layer.input_layernorm = IdentityOp
    if getattr(context.config, "norm_placement", "pre") == "sandwich":
        submodules = layer.self_attention.submodules
        submodules.out_proj = post_normed(submodules.out_proj, norm_of(context.backend, context.config))


def adapt_query_key_norms(layer: Any, context: LayerContext) -> None:
    """Puts our norms of queries and keys into a layer's spec, by ``qk_norm_kind`` of its config.

    It is "head" (the default; mcore's own), "all_heads" (one norm over all heads together), "each_head" (own weights in
    each head), "unweighted" (no weights) or "after_rope" (each head, after rotation). "after_rope_unweighted" has no
    weights, and is for layers that rotate. ``qk_layernorm`` must be set for norms with weights: by it mcore sums the
    gradients of ``q_layernorm`` and ``k_layernorm`` over the TP ranks.
    """
    config, kind = context.config, getattr(context.config, "qk_norm_kind", "head")
    if kind == "head":
        return
    attention = layer.self_attention.submodules
    if kind == "all_heads":
        if context.backend == "te":
            say("TransformerEngine has no norm over the heads of several ranks: queries and keys use torch's norm")
        attention.q_layernorm, attention.k_layernorm = QueryNorm, KeyNorm
    elif kind == "each_head" and config.qk_layernorm:
        attention.q_layernorm, attention.k_layernorm = EachQueryNorm, EachKeyNorm
    elif kind == "unweighted":
        attention.q_layernorm = attention.k_layernorm = UnitNorm
    elif kind == "after_rope":
        attention.q_layernorm = attention.k_layernorm = IdentityOp
        attention.core_attention = normed_after_rope(attention.core_attention, norm_of(context.backend, config))
    elif kind == "after_rope_unweighted" and not is_unrotated(config, context.number):
        attention.core_attention = normed_after_rope(attention.core_attention, UnitNorm)


def final_norm(backend: Backend, config: TransformerConfig) -> type:
    """The class of the final norm, whose weight may be zero-centered where the weights of other norms are not, or not
    where they are.
    """
    centered = getattr(config, "final_norm_centered", None)
    norm = norm_of(backend, config)
    return norm if centered is None else _centered(norm, centered)


@functools.cache
def _centered(norm: type, centered: bool) -> type:
    return type(f"Centered{norm.__name__}", (CenteredNorm,), {"norm": norm, "centered": centered})


class CenteredNorm:
    """Makes a norm whose weight is zero-centered, or not, whatever the config of the model says."""

    norm: ClassVar[type]
    centered: ClassVar[bool]

    def __new__(cls, config: TransformerConfig, *sizes: int, **arguments: Any) -> Any:
        own = copy.copy(config)
        own.layernorm_zero_centered_gamma = cls.centered
        return cls.norm(own, *sizes, **arguments)


def norm_embedding(chunk: GPTModel) -> None:
    """Put a norm behind the word embeddings, if ``config.embedding_norm`` is "unweighted" or "weighted"."""
    config = chunk.config
    kind = getattr(config, "embedding_norm", None)
    if kind is not None and hasattr(chunk, "embedding"):
        norm = (Norm if kind == "weighted" else UnitNorm)(config, config.hidden_size, eps=config.layernorm_epsilon)
        if kind == "weighted":
            chunk.embedding.layernorm = norm
        chunk.embedding.word_embeddings.register_forward_hook(lambda module, inputs, output: norm(output))


def adapt_expert_norm(layer: Any, context: LayerContext) -> None:
    """Puts a norm after the summed output of a layer's routed experts, if its config has ``expert_norm``."""
    if not getattr(context.config, "expert_norm", False) or not _has_experts(layer):
        return
    _norm_experts(layer, norm_of(context.backend, context.config))


def _has_experts(layer: Any) -> bool:
    return hasattr(submodules_of(layer.mlp), "router")


def _norm_experts(layer: Any, norm: type) -> None:
    layer.mlp = with_module(layer.mlp, lambda module: post_normed(module, norm))


@functools.cache
def post_normed(module: type, norm: type) -> type:
    """A subclass of ``module``, which is an output projection or all experts of a layer, with ``norm`` after it."""
    return type(f"PostNormed{module.__name__}", (PostNorm, module), {"norm": norm, "__doc__": PostNorm.__doc__})


class PostNorm(ChangesOutput):
    """A module with a norm of its output, after the reduction over TP, after an adapter and after the bias."""

    norm: ClassVar[type]

    def __init__(self, *sizes: int, config: TransformerConfig, **arguments: Any) -> None:
        super().__init__(*sizes, config=config, **arguments)
        epsilon = getattr(config, "post_norm_epsilon", config.layernorm_epsilon)
        self.post_layernorm = self.norm(config, config.hidden_size, eps=epsilon)
        self.register_forward_hook(_norm_output)  # an adapter's hook runs before this hook


def _norm_output(module: Any, inputs: object, outputs: tuple[Tensor, Tensor | None]) -> tuple[Tensor, None]:
    output, bias = outputs
    return module.post_layernorm(output if bias is None else output + bias), None


class AllHeadsNorm(Norm):
    """RMSNorm over all heads together, as the submodule that mcore has for a norm of each head.

    Every TP rank holds the weights of all heads, and uses the weights of its heads. The gradient is zero for other
    heads. So the sum over ranks, which mcore computes for parameters with these names, is the whole gradient.
    """

    heads: ClassVar[str]

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        self.num_heads, self.head_dim = getattr(config, self.heads), hidden_size
        super().__init__(config, self.num_heads * hidden_size, eps)
        if not self.rms:
            raise ConfigError(
                f"normalization must be RMSNorm to norm all heads together, found {config.normalization!r}"
            )

    def forward(self, hidden: Tensor) -> Tensor:
        """Norms heads ``[..., heads of this rank, dim]``."""
        group = parallel_state.get_tensor_model_parallel_group()
        held = hidden.size(-2)
        squares = hidden.float().square().sum((-2, -1), keepdim=True)
        if group.size() > 1:  # the backward sums too: the output of a rank depends on the heads of all ranks
            squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        heads_summed = held * group.size()  # if ranks share a key head, it counts on each of them
        first = group.rank() * self.num_heads // group.size()
        weight = self.weight.view(self.num_heads, self.head_dim)[first : first + held]
        return self.scaled(hidden, squares / (heads_summed * self.head_dim), weight)


class QueryNorm(AllHeadsNorm):
    """RMSNorm over all query heads."""

    heads = "num_attention_heads"


class KeyNorm(AllHeadsNorm):
    """RMSNorm over all key heads."""

    heads = "num_query_groups"


class EachHeadNorm(Norm):
    """LayerNorm of each head, by weights that differ between heads, as the submodule that mcore has for one weight.

    Every TP rank holds the weights ``[all heads, dim]``. Their gradients are summed as for ``AllHeadsNorm``.
    """

    heads: ClassVar[str]

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps)
        self.num_heads = getattr(config, self.heads)
        self.weight = nn.Parameter(self.weight.detach().repeat(self.num_heads, 1))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Norms heads ``[..., heads of this rank, dim]``."""
        group, held = parallel_state.get_tensor_model_parallel_group(), hidden.size(-2)
        first = group.rank() * self.num_heads // group.size()
        normed = nn.functional.layer_norm(hidden.float(), hidden.shape[-1:], eps=self.eps)
        return (normed * self.weight[first : first + held].float()).to(hidden.dtype)


class EachQueryNorm(EachHeadNorm):
    """LayerNorm of each query head."""

    heads = "num_attention_heads"


class EachKeyNorm(EachHeadNorm):
    """LayerNorm of each key head."""

    heads = "num_query_groups"


@functools.cache
def normed_after_rope(core_attention: type, norm: type) -> type:
    """A subclass of ``core_attention`` that first norms each head of queries and keys."""
    name = f"NormedAfterRope{core_attention.__name__}"
    return type(name, (NormAfterRope, core_attention), {"norm": norm, "__doc__": NormAfterRope.__doc__})


class NormAfterRope(nn.Module):
    """Core attention that first norms queries and keys, which are already rotated."""

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
        """Its parameters for a checkpoint of megatron-core, whose own core attention has none."""
        return sharded_tensors(self, prefix, sharded_offsets)
