"""Linear attention (the gated delta rule), and full attention with an output gate, for models that have both.

With backend te, megatron-core's ``GatedDeltaNet`` is used if flash-linear-attention is installed and megatron-core can
pack sequences for it. Otherwise our module is used. Its parameters have equal names, shapes and shards. It computes in
torch, in the order of transformers' fallback without kernels.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange, repeat
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, get_cuda_rng_tracker
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the usual name)

from mcore_bridge.factory.modules.backend import LayerContext, say
from mcore_bridge.factory.modules.mixers.mixer import Mixer, submodules_for
from mcore_bridge.factory.modules.streams import has_streams
from mcore_bridge.factory.modules.torch_modules import gather_text, own_text, placement
from mcore_bridge.installed import Release

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

PACKED = Release("0.19", "refuses packed sequences in gated delta nets")
CHUNK = 64
"""Tokens that are computed together; the result does not depend on it."""


def adapt_output_gate(layer: Any, context: LayerContext) -> None:
    """Lets attention of each size have an output gate, if the config has one."""
    if context.config.attention_output_gate:
        layer.self_attention.module = GatedSelfAttention


def adapt_linear_attention(layer: Any, context: LayerContext) -> None:
    """Puts linear attention into a layer, if it has one."""
    if _is_linear(context.config, context.number):
        layer.self_attention = _delta_spec(context.config, context.backend)


def _is_linear(config: TransformerConfig, number: int) -> bool:
    if config.experimental_attention_variant != "gated_delta_net":
        return False
    freq = config.linear_attention_freq
    return bool(freq[number] if isinstance(freq, list) else (number + 1) % freq)


def _delta_spec(config: TransformerConfig, backend: str) -> ModuleSpec:
    lacking = _lacking(config) if backend == "te" else "backend torch"
    if backend == "te" and lacking:
        say(f"{lacking}: gated delta nets compute in torch")
    return ModuleSpec(
        module=TorchGatedDeltaNet if lacking else GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            out_norm=HeadNorm, **vars(submodules_for(backend, normed=not has_streams(config)))
        ),
    )


def _lacking(config: TransformerConfig) -> str:
    """Why megatron-core's own module cannot be used; "" if it can."""
    if getattr(config, "delta_negative_eigenvalues", False):
        return "megatron-core's gated delta nets have no beta above 1"
    if getattr(config, "delta_gate_activation", "silu") != "silu":
        return "megatron-core's gated delta nets have a gate of SiLU"
    if importlib.util.find_spec("fla") is None:
        return "flash-linear-attention is not installed"
    return "" if PACKED.is_installed else f"megatron-core before {PACKED.version} {PACKED.reason}"


class GatedSelfAttention(SelfAttention):
    """mcore's attention with an output gate. mcore 0.16 keeps too many gates if ``tp`` cuts a group."""

    def get_query_key_value_tensors(self, *arguments: Any, **keywords: Any) -> Any:
        """Query, key, value, and the gates of exactly these queries."""
        query, key, value, gate = super().get_query_key_value_tensors(*arguments, **keywords)
        if gate.size(2) > query.size(2):
            pieces = gate.split(query.size(2), dim=2)
            gate = pieces[self.pg_collection.tp.rank() % len(pieces)]
        return query, key, value, gate


class HeadNorm(nn.Module):
    """RMSNorm of each head of this rank, with one weight for all heads. It is never zero-centred.

    Its epsilon is ``config.head_norm_epsilon``, if the config has one. The heads of other ranks share the weight. The
    backward pass sums its gradient over ``tp``, so the weight has no ``sequence_parallel`` attribute.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = getattr(config, "head_norm_epsilon", eps)
        self.weight = nn.Parameter(torch.ones(hidden_size, **placement(config)))

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # mcore compiles its caller; this has a collective
    def forward(self, heads: Tensor) -> Tensor:
        """Norms heads ``[..., hidden_size]``: statistics in fp32, cast back, then times the weight."""
        weight = copy_to_tensor_model_parallel_region(self.weight)
        normed = heads.float()
        normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + self.eps)
        return weight * normed.to(heads.dtype)


class TorchGatedDeltaNet(Mixer, GatedDeltaNet):
    """mcore's ``GatedDeltaNet`` in plain torch, which runs on any device."""

    instead = (
        f"use backend te with flash-linear-attention installed and megatron-core {PACKED.version} or later, or export "
        "the weights to an engine"
    )

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: Any,  # mcore 0.19 also passes name, cp_comm_type and pp_layer_offset
    ) -> None:
        MegatronModule.__init__(self, config)  # mcore's own constructor needs flash-linear-attention
        assert pg_collection is not None
        self.layer_number, self.pg_collection = layer_number, pg_collection
        self.tp_group, self.cp_group, self.tp_size = pg_collection.tp, pg_collection.cp, pg_collection.tp.size()
        self.key_head_dim, self.value_head_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.num_key_heads, self.num_value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.largest_beta = 2.0 if getattr(config, "delta_negative_eigenvalues", False) else 1.0
        self.gate_activation = getattr(config, "delta_gate_activation", "silu")
        self._set_sizes()
        self.in_proj = self._entering(submodules.in_proj, config, self.in_proj_dim)
        self._make_own_parameters(config)
        self.out_norm = build_module(
            submodules.out_norm, config=config, hidden_size=self.value_head_dim, eps=config.layernorm_epsilon
        )
        self.out_proj = self._leaving(submodules.out_proj, config, self.v_dim)

    def _set_sizes(self) -> None:
        """Sets sizes under the names of mcore, whose ``sharded_state_dict`` reads them."""
        self.conv_bias = False
        self.qk_dim, self.v_dim = self.key_head_dim * self.num_key_heads, self.value_head_dim * self.num_value_heads
        self.in_proj_dim = 2 * self.qk_dim + 2 * self.v_dim + 2 * self.num_value_heads
        self.qk_dim_local_tp, self.v_dim_local_tp = self.qk_dim // self.tp_size, self.v_dim // self.tp_size
        self.conv_dim_local_tp = 2 * self.qk_dim_local_tp + self.v_dim_local_tp
        self.num_v_heads_local_tp = self.num_value_heads // self.tp_size
        self.in_proj_split_names = ["query", "key", "value", "z", "beta", "alpha"]
        self.in_proj_split_sections = (
            *(self.qk_dim_local_tp, self.qk_dim_local_tp, self.v_dim_local_tp, self.v_dim_local_tp),
            *(self.num_v_heads_local_tp, self.num_v_heads_local_tp),
        )

    def _make_own_parameters(self, config: TransformerConfig) -> None:
        """Makes convolution, time step and decay. Each rank draws other values, since it has other heads."""
        where = placement(config)
        channels, heads = self.conv_dim_local_tp, self.num_v_heads_local_tp
        drawn = config.perform_initialization
        with get_cuda_rng_tracker().fork() if drawn else contextlib.nullcontext():
            kernel = config.linear_conv_kernel_dim
            self.conv1d = nn.Conv1d(channels, channels, kernel, groups=channels, bias=False, **where)
            self.dt_bias = nn.Parameter(torch.ones(heads, **where))
            self.A_log = nn.Parameter(torch.empty(heads, **where))
            if drawn:
                nn.init.uniform_(self.A_log, 1, 16).data.log_()
        for parameter in (self.conv1d.weight, self.dt_bias, self.A_log):
            parameter.tensor_model_parallel, parameter.partition_dim = True, 0  # type: ignore[attr-defined]

    def _sequences(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [self._sequence(part) for part in parts]

    def _sequence(self, mixed: Tensor) -> Tensor:
        """Everything between ``in_proj`` and ``out_proj`` for one sequence, from ``[s, b, n]`` to ``[s, b, n]``."""
        mixed = rearrange(gather_text(mixed, self.cp_group), "s b n -> b s n")
        *qkv, gate, beta, alpha = mixed.split(self.in_proj_split_sections, dim=-1)
        query, key, value = self._convolved(torch.cat(qkv, dim=-1))
        decay = -self.A_log.float().exp() * F.softplus(alpha.float() + self.dt_bias)
        context = gated_delta_rule(query, key, value, decay, self.largest_beta * beta.sigmoid())
        gate = rearrange(gate, "b s (n d) -> b s n d", d=self.value_head_dim)
        opened = getattr(F, self.gate_activation)(gate.float())
        gated = (self.out_norm(context) * opened).to(context.dtype)
        return own_text(rearrange(gated, "b s n d -> s b (n d)"), self.cp_group)

    def _convolved(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The causal convolution of each channel, cut into query, key and value ``[b, s, heads, dim]``."""
        past = F.pad(rearrange(qkv, "b s n -> b n s"), (self.conv1d.kernel_size[0] - 1, 0))
        mixed = rearrange(F.silu(self.conv1d(past)), "b n s -> b s n")
        query, key, value = mixed.split(self.in_proj_split_sections[:3], dim=-1)
        query, key = (rearrange(part, "b s (n d) -> b s n d", d=self.key_head_dim) for part in (query, key))
        return query, key, rearrange(value, "b s (n d) -> b s n d", d=self.value_head_dim)


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule: a state decays at each token, and is corrected by the error of its prediction of the value.

    ``S[t] = exp(decay[t]) S[t-1] + key[t] (x) u[t]``, where
    ``u[t] = beta[t] (value[t] - exp(decay[t]) S[t-1]^T key[t])``. The output is ``S[t]^T query[t]``. All is in fp32,
    with queries and keys of length 1. A triangular system gives the ``u`` of a whole chunk of tokens.

    Args:
        query: ``[b, s, key heads, key dim]``; it is scaled here by ``key dim ** -0.5``.
        key: ``[b, s, key heads, key dim]``; all value heads of a key head share it.
        value: ``[b, s, value heads, value dim]``.
        decay: ``[b, s, value heads]``, not above 0.
        beta: ``[b, s, value heads]``, from 0 to 1, or to 2 if the state may change its sign.

    Returns:
        ``[b, s, value heads, value dim]`` in the dtype of ``query``.
    """
    times = value.size(2) // key.size(2)
    queries, keys = (repeat(_unit(part.float()), "b s n d -> b (n times) s d", times=times) for part in (query, key))
    queries = queries * key.size(-1) ** -0.5
    values, decays, betas = (
        rearrange(part.float(), "b s n ... -> b n s ...") for part in (value, decay, beta[..., None])
    )
    state = values.new_zeros(*keys.shape[:2], keys.size(-1), values.size(-1))
    answers = []
    parts = (part.split(CHUNK, dim=2) for part in (queries, keys, values, decays, betas))
    for q, k, v, log_decay, b in zip(*parts, strict=True):
        since = log_decay.cumsum(-1)  # log of the decay since the start of the chunk
        between = (since[..., :, None] - since[..., None, :]).masked_fill(_ahead(since), float("-inf")).exp()
        kept = since.exp()[..., None]
        learned = torch.linalg.solve_triangular(
            b * (k @ k.mT) * between, b * (v - kept * (k @ state)), upper=False, unitriangular=True
        )
        answers.append(kept * (q @ state) + ((q @ k.mT) * between) @ learned)
        left = (since[..., -1:] - since).exp()[..., None]
        state = kept[..., -1:, :] * state + (left * k).mT @ learned
    return rearrange(torch.cat(answers, dim=2), "b n s d -> b s n d").to(query.dtype)


def _unit(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + 1e-6)


def _ahead(since: Tensor) -> Tensor:
    size = since.size(-1)
    return torch.ones(size, size, dtype=torch.bool, device=since.device).triu(1)
