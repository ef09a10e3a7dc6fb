"""Kimi delta attention in the place of attention: a gated delta rule in which each channel of a key decays by itself.

It computes in torch on any device, or by the kernel of flash-linear-attention on a GPU that has it. Whole heads are
dealt to the TP ranks. Decay and gate have a projection each, or two through narrow inputs. The narrow projections are
cut too, and their outputs are gathered.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the usual name)

from mcore_bridge.factory.modules.backend import say
from mcore_bridge.factory.modules.mixers.delta import HeadNorm, _ahead, _unit
from mcore_bridge.factory.modules.mixers.mixer import MixerSubmodules, OwnMixer, sharded_mixer, submodules_for
from mcore_bridge.factory.modules.torch_modules import gather_text, own_text, placement

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from megatron.core.transformer import TransformerConfig

CHUNK = 16
"""Tokens that are computed together; the result does not depend on it. Memory grows with it, since each channel of a
key has a decay between any two tokens of a chunk.
"""


def kda_spec(backend: str) -> ModuleSpec:
    """The spec of Kimi delta attention. The norm before it stays separate, as before latent attention."""
    return ModuleSpec(KimiDeltaAttention, submodules=submodules_for(backend, normed=False))


class KimiDeltaAttention(OwnMixer):
    """``out_proj(norm(rule(q, k, v, decay, beta)) * sigmoid(gate))``, with a convolution of queries, keys and values.

    ``in_proj`` gives queries, keys, values and beta of whole heads. With ``config.kda_full_rank`` it also gives their
    decays and gates. Without, it gives narrow inputs, which ``decay_up`` and ``gate_up`` widen to all channels of these
    heads. With ``config.kda_lower_bound``, a sigmoid keeps decays above it.
    """

    def _make(self, config: TransformerConfig, submodules: MixerSubmodules) -> None:
        self.dim, num_heads, num_ranks = config.linear_key_head_dim, config.linear_num_key_heads, self.tp_group.size()
        self.heads, self.lower_bound = num_heads // num_ranks, getattr(config, "kda_lower_bound", None)
        self.is_narrow = not getattr(config, "kda_full_rank", False)
        self.rate_shape = (1, 1, self.heads, 1) if getattr(config, "kda_rate_dims", 1) == 4 else (self.heads,)
        self.axes_of_heads = {**dict.fromkeys(OWN, 0), "A_log": self.rate_shape.index(self.heads)}
        inner = self.heads * self.dim
        given = self.dim // num_ranks if self.is_narrow else inner
        self.sections = {
            **dict.fromkeys(("query", "key", "value"), inner),
            "beta": self.heads,
            "decay": given,
            "gate": given,
        }
        self.in_proj = self._entering(submodules.in_proj, config, num_ranks * sum(self.sections.values()))
        self._make_own_parameters(config)
        self.out_norm = HeadNorm(config, self.dim, config.layernorm_epsilon)
        self.out_proj = self._leaving(submodules.out_proj, config, num_ranks * inner)

    def _make_own_parameters(self, config: Any) -> None:
        """Makes all but ``in_proj``, norm and ``out_proj``. Each rank draws other values, since it has other heads."""
        where, inner, drawn = placement(config), self.heads * self.dim, config.perform_initialization
        with get_cuda_rng_tracker().fork() if drawn else contextlib.nullcontext():
            width = config.linear_conv_kernel_dim
            self.conv1d = nn.Conv1d(3 * inner, 3 * inner, width, groups=3 * inner, bias=False, **where)
            if self.is_narrow:
                self.decay_up = nn.Linear(self.dim, inner, bias=False, **where)
                self.gate_up = nn.Linear(self.dim, inner, bias=False, **where)
            self.dt_bias = nn.Parameter(torch.empty(inner, **where))
            self.A_log = nn.Parameter(torch.empty(self.rate_shape, **where))
            if drawn:
                for name in ("decay_up", "gate_up") if self.is_narrow else ():
                    config.init_method(getattr(self, name).weight)
                nn.init.uniform_(self.A_log, 1, 16).data.log_()
                steps = nn.init.uniform_(self.dt_bias, math.log(1e-3), math.log(1e-1)).data.exp_().clamp_(min=1e-4)
                steps.add_(torch.log(-torch.expm1(-steps)))  # the inverse of softplus
        for name, parameter in self.named_parameters():
            if name in self.axes_of_heads:
                cut: Any = parameter
                cut.tensor_model_parallel, cut.partition_dim = True, self.axes_of_heads[name]

    def _sequences(self, parts: Sequence[Tensor]) -> list[Tensor]:
        texts = [gather_text(part, self.cp_group) for part in parts]
        cut = [text.split([*self.sections.values()], dim=-1) for text in texts]
        convolved = self._all_convolved([torch.cat(sections[:3], dim=-1) for sections in cut])
        pairs = zip(convolved, cut, strict=True)
        return [own_text(self._mixed(F.silu(qkv), *sections[3:]), self.cp_group) for qkv, sections in pairs]

    def _mixed(self, qkv: Tensor, beta: Tensor, decay: Tensor, gate: Tensor) -> Tensor:
        """The gated outputs ``[s, b, n]`` of this rank's heads for one sequence, from its sections ``[s, b, ...]``."""
        if self.is_narrow:
            decay, gate = self._widened(decay, gate)
        query, key, value = rearrange(qkv, "s b (three n d) -> three b s n d", three=3, d=self.dim)
        decays = self._bounded(rearrange(decay.float() + self.dt_bias.float(), "s b (n d) -> b s n d", d=self.dim))
        rule = kernel_or_torch(query.device)
        context = rule(query, key, value, decays, rearrange(beta, "s b n -> b s n").sigmoid())
        opened = rearrange(gate, "s b (n d) -> b s n d", d=self.dim).float().sigmoid()
        gated = (self.out_norm(context.float()) * opened).to(qkv.dtype)
        return rearrange(gated, "b s n d -> s b (n d)")

    def _widened(self, decay: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        """Decays and gates for all channels of this rank's heads, from this rank's part of the narrow inputs."""
        narrow = all_gather_last_dim_from_tensor_parallel_region(torch.cat((decay, gate), dim=-1), group=self.tp_group)
        low, high = rearrange(narrow, "s b (tp two n) -> two s b (tp n)", two=2, n=decay.size(-1))
        return self.decay_up(low), self.gate_up(high)

    def _bounded(self, steps: Tensor) -> Tensor:
        """The logs of decays, from time steps ``[b, s, n, d]`` before their activation."""
        rates = self.A_log.float().exp().view(-1, 1)
        if self.lower_bound is None:
            return -rates * F.softplus(steps)
        return self.lower_bound * (rates * steps).sigmoid()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """The tensors of the mixer for a checkpoint of megatron-core, in which each section is cut separately."""
        convolved = {name: self.sections[name] for name in ("query", "key", "value")}
        parts = {"in_proj.weight": self.sections, "conv1d.weight": convolved}
        tensors = sharded_mixer(self, OWN, parts, prefix, sharded_offsets, metadata)
        others = {"out_norm.weight": self.out_norm.weight, "A_log": self.A_log}
        return tensors | make_sharded_tensors_for_checkpoint(others, prefix, self.axes_of_heads, sharded_offsets)


OWN = ("conv1d.weight", "decay_up.weight", "gate_up.weight", "dt_bias")
"""The parameters of the mixer that are cut by heads along dim 0, besides ``A_log``."""


def kernel_or_torch(device: torch.device) -> Callable[..., Tensor]:
    """The rule as flash-linear-attention's kernel, if it is installed and tensors are on a GPU; else in torch."""
    if device.type != "cuda":
        return channel_delta_rule
    if importlib.util.find_spec("fla") is None:
        say("flash-linear-attention is not installed: Kimi delta attention computes in torch, which is slower")
        return channel_delta_rule
    return _by_kernel


def _by_kernel(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    answer: Tensor = _kernel()(
        *(part.contiguous() for part in (query, key, value, decay, beta)), use_qk_l2norm_in_kernel=True
    )[0]
    return answer


@functools.cache
def _kernel() -> Callable[..., Any]:
    from fla.ops.kda import chunk_kda

    kernel: Callable[..., Any] = chunk_kda
    return kernel


def channel_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule with a decay for each channel of a key.

    ``S[t] = exp(decay[t]) S[t-1] + key[t] (x) u[t]``, where
    ``u[t] = beta[t] (value[t] - (exp(decay[t]) S[t-1])^T key[t])``. The output is ``S[t]^T query[t]``. The decay
    multiplies the rows of S. All is in fp32, with queries and keys of length 1. A triangular system gives the ``u`` of
    a whole chunk of tokens.

    Args:
        query: ``[b, s, heads, key dim]``; it is scaled here by ``key dim ** -0.5``.
        key: ``[b, s, heads, key dim]``.
        value: ``[b, s, heads, value dim]``.
        decay: ``[b, s, heads, key dim]``, not above 0.
        beta: ``[b, s, heads]``, from 0 to 1.

    Returns:
        ``[b, s, heads, value dim]`` in the dtype of ``query``.
    """
    queries, keys, values, decays, betas = (
        rearrange(part.float(), "b s n d -> b n s d") for part in (query, key, value, decay, beta[..., None])
    )
    queries, keys = _unit(queries) * key.size(-1) ** -0.5, _unit(keys)
    state = values.new_zeros(*keys.shape[:2], keys.size(-1), values.size(-1))
    answers = []
    parts = (part.split(CHUNK, dim=2) for part in (queries, keys, values, decays, betas))
    for q, k, v, log_decay, b in zip(*parts, strict=True):
        since = log_decay.cumsum(-2)  # log of the decay since the start of the chunk
        kept = since.exp()
        between = since[..., :, None, :] - since[..., None, :, :]
        seen = between.masked_fill(_ahead(since[..., 0])[..., None], float("-inf")).exp() * k[..., None, :, :]
        learned = torch.linalg.solve_triangular(
            b * (seen @ k[..., None])[..., 0], b * (v - (kept * k) @ state), upper=False, unitriangular=True
        )
        answers.append((kept * q) @ state + (seen @ q[..., None])[..., 0] @ learned)
        left = (since[..., -1:, :] - since).exp()
        state = kept[..., -1, :, None] * state + (left * k).mT @ learned
    return rearrange(torch.cat(answers, dim=2), "b n s d -> b s n d").to(query.dtype)
