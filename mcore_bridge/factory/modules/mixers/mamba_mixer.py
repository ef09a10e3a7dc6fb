"""A Mamba-2 mixer in the place of attention. It runs on any device, in torch or by kernels (``mamba_kernels.py``).

Its parameters are cut and saved like the parameters of megatron-core's ``MambaMixer``. It computes in the order of
transformers. Time steps are not clamped, as in megatron-core's kernel and in engines. In checkpoints of megatron-core,
z, x, B, C and dt are each cut separately.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from megatron.core.tensor_parallel import all_gather_last_dim_from_tensor_parallel_region, get_cuda_rng_tracker
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the usual name)

from mcore_bridge.factory.modules.mixers.mamba_kernels import Operations, operations_for
from mcore_bridge.factory.modules.mixers.mixer import MixerSubmodules, OwnMixer, sharded_mixer, submodules_for
from mcore_bridge.factory.modules.torch_modules import gather_text, own_text, placement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron.core.transformer import TransformerConfig


_FIRST_STEPS = (0.001, 0.1)
"""The range of time steps from initial biases, as in megatron-core."""
_OWN = ("A_log", "D", "dt_bias", "conv1d.weight", "conv1d.bias", "norm.weight")


def mamba_spec(backend: str, *, normed: bool = True) -> ModuleSpec:
    """The spec of a mixer. With backend te, the norm before it is in ``in_proj``, unless ``normed`` is False."""
    return ModuleSpec(TorchMamba, submodules=submodules_for(backend, normed=normed))


class Groups:
    """The groups of a mixer on this TP rank, or the group that it shares with neighbouring ranks.

    With more ranks than groups, each has some heads of one group, and an equal part of its rows of B and C.
    """

    def __init__(self, config: TransformerConfig, tp_group: Any) -> None:
        self.tp_group, ranks = tp_group, tp_group.size()
        self.count, self.sharers = max(config.mamba_num_groups // ranks, 1), max(ranks // config.mamba_num_groups, 1)

    def whole(self, part: Tensor) -> Tensor:
        """Gather parts ``[..., n]`` of all ranks that share the group of this rank, as ``[..., sharers, n]``.

        The backward sums the gradients of these ranks.
        """
        if self.sharers == 1:
            return part.unsqueeze(-2)
        parts = all_gather_last_dim_from_tensor_parallel_region(part, group=self.tp_group)
        parts = parts.unflatten(-1, (self.tp_group.size(), -1))
        return parts.narrow(-2, self.tp_group.rank() // self.sharers * self.sharers, self.sharers)


class GroupNorm(nn.Module):
    """RMSNorm of each group of channels, after a gate; each channel has a weight."""

    def __init__(self, config: TransformerConfig, channels: int, groups: Groups) -> None:
        super().__init__()
        self.eps, self.groups = config.layernorm_epsilon, groups
        self.weight = nn.Parameter(torch.ones(channels, **placement(config)))

    def forward(self, hidden: Tensor, gate: Tensor) -> Tensor:
        """Norms ``hidden * silu(gate)``, each ``[..., channels]``, in fp32, and casts it to the dtype of the gate."""
        gated = (hidden.float() * F.silu(gate.float())).unflatten(-1, (self.groups.count, -1))
        mean_squares = self.groups.whole(gated.square().mean(-1)).mean(-2)
        normed = gated * torch.rsqrt(mean_squares + self.eps).unsqueeze(-1)
        return self.weight * normed.flatten(-2).to(gate.dtype)


class Gate(nn.Module):
    """The gate alone, for mixers without a norm."""

    def forward(self, hidden: Tensor, gate: Tensor) -> Tensor:
        """``hidden * silu(gate)``, each ``[..., channels]``, in fp32, and cast to the dtype of the gate."""
        return (hidden.float() * F.silu(gate.float())).to(gate.dtype)


class TorchMamba(OwnMixer):
    """A Mamba-2 mixer."""

    def _make(self, config: TransformerConfig, submodules: MixerSubmodules) -> None:
        ranks = self.tp_group.size()
        self.heads, self.groups = config.mamba_num_heads // ranks, Groups(config, self.tp_group)
        inner, state = self.heads * config.mamba_head_dim, config.mamba_num_groups * config.mamba_state_dim // ranks
        self.sections = {"z": inner, "x": inner, "B": state, "C": state, "dt": self.heads}
        by = getattr(config, "side_multipliers", None)
        self.multipliers = by and tuple(by.mixer_in * of_part for of_part in by.mixer_parts)
        self.in_proj = self._entering(submodules.in_proj, config, sum(self.sections.values()) * ranks)
        self._make_own_parameters(config)
        self.norm = GroupNorm(config, inner, self.groups) if getattr(config, "mamba_norm", True) else Gate()
        self.out_proj = self._leaving(submodules.out_proj, config, inner * ranks)
        for parameter in (self.A_log, self.D, self.dt_bias, *self.conv1d.parameters(), *self.norm.parameters()):
            parameter.tensor_model_parallel, parameter.partition_dim = True, 0  # type: ignore[attr-defined]

    def _make_own_parameters(self, config: Any) -> None:
        """Makes convolution, time step, decay and skip. Each rank draws other values, since it has other heads."""
        where, drawn = placement(config), config.perform_initialization
        channels = sum(self.sections[name] for name in "xBC")
        with get_cuda_rng_tracker().fork() if drawn else contextlib.nullcontext():
            self.conv1d = nn.Conv1d(channels, channels, config.mamba_conv_kernel, groups=channels, **where)
            self.dt_bias, self.A_log = (nn.Parameter(torch.empty(self.heads, **where)) for _ in range(2))
            self.D = nn.Parameter(torch.ones(self.heads, **where))
            if drawn:
                nn.init.uniform_(self.A_log, 1, 16).data.log_()
                steps = nn.init.uniform_(self.dt_bias, math.log(_FIRST_STEPS[0]), math.log(_FIRST_STEPS[1])).data.exp_()
                steps.copy_(steps.float() + torch.log(-torch.expm1(-steps.float())))  # the inverse of softplus

    def _sequences(self, parts: Sequence[Tensor]) -> list[Tensor]:
        texts = [rearrange(gather_text(part, self.cp_group), "s b n -> b s n") for part in parts]
        operations = operations_for(texts[0], self.conv1d)
        if len(texts) > 1 and operations.packs:  # one row
            lengths = [text.size(1) for text in texts]
            counts = torch.tensor(lengths, device=texts[0].device)
            numbers = torch.arange(len(texts), device=counts.device, dtype=torch.int32).repeat_interleave(counts)
            mixed = self._mixed(torch.cat(texts, dim=1), operations, numbers[None]).split(lengths, dim=1)
        else:
            mixed = tuple(self._mixed(text, operations, None) for text in texts)
        return [own_text(rearrange(text, "b s n -> s b n"), self.cp_group) for text in mixed]

    def _mixed(self, mixed: Tensor, operations: Operations, numbers: Tensor | None) -> Tensor:
        """The gated and normed output of the recurrence, from ``[b, s, n]`` to ``[b, s, n]``."""
        parts = mixed.split(tuple(self.sections.values()), dim=-1)
        if self.multipliers is not None:
            parts = tuple(part * multiplier for part, multiplier in zip(parts, self.multipliers, strict=True))
        gate, *xbc, steps = parts
        convolved = operations.convolve(torch.cat(xbc, dim=-1), self.conv1d, numbers)
        x, into, out_of = convolved.split([self.sections[name] for name in "xBC"], dim=-1)
        x = x.unflatten(-1, (self.heads, -1))
        into, out_of = self._of_groups(torch.stack((into, out_of), dim=-2))
        steps = F.softplus(steps.float() + self.dt_bias.float())
        decay = -self.A_log.float().exp()
        context = operations.scan(x, steps, decay, into, out_of, self.D, numbers=numbers)
        normed: Tensor = self.norm(context.flatten(-2), gate)
        return normed

    def _of_groups(self, both: Tensor) -> tuple[Tensor, ...]:
        """B and C of the groups of this rank, ``[b, s, groups, state]`` each, from ``[b, s, 2, n]`` of this rank."""
        parts = self.groups.whole(both.flatten(-2)).unflatten(-1, (2, self.groups.count, -1))
        return rearrange(parts, "b s sharers two groups n -> two b s groups (sharers n)").unbind()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """The tensors of the mixer for a checkpoint of megatron-core, under the keys of ``MambaMixer``."""
        convolved = {part: self.sections[part] for part in "xBC"}
        parts = {"in_proj.weight": self.sections, "conv1d.weight": convolved, "conv1d.bias": convolved}
        return sharded_mixer(self, _OWN, parts, prefix, sharded_offsets, metadata)
