"""The functions that RLinf's resharder calls, made from our rules, for any family.

They keep RLinf's contracts, with one collective for each parameter. If the whole resharder can be replaced, use the
faster ``MegatronCoreWeightReshard`` of ``weight_reshard.py`` instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_bridge.errors import MeshError
from mcore_bridge.trainers.rlinf.parameter_rules import Parameter, Parameters
from mcore_bridge.weights.provenance import HF
from mcore_bridge.weights.transfer.collectives import Group

State = dict[str, Tensor]
"""Tensors by name: Megatron's names, with global numbers of layers and experts, or HF's."""
Spec = tuple[Any, ...] | None
"""How ``narrow_to_target`` cuts a gathered tensor; None means that it is not cut."""
ProcessGroup = Any


class ReshardFunctions:
    """The functions of ``ReshardConfig``, for all generations of its interface.

    >>> functions = ReshardFunctions(model_config, hf="path/of/model", reshard_tp_size=2)
    >>> ReshardConfig(..., tp_reshard_fn=functions.tp_reshard_fn, convert_fn=functions.convert_fn)

    Args:
        model_config: the trainer's ``TransformerConfig``.
        hf: the HF config or folder.
        reshard_tp_size: tensor parallel size of the engine.

    Raises:
        ConfigError: no architecture is registered for ``hf``, or RLinf's interface cannot express one of its layouts.
    """

    def __init__(self, model_config: Any, *, hf: HF, reshard_tp_size: int = 1) -> None:
        self._parameters = Parameters(model_config, hf, reshard_tp_size)

    def tp_reshard_fn(self, model_state_dict: State, merge_factor: int, tp_group: ProcessGroup) -> State:
        """Join the shards of ``merge_factor`` neighbours, for RLinf up to 0.4.0. Gate and up alternate by neighbour."""
        group = Group(tp_group)
        if group.size != merge_factor:
            raise MeshError(f"merge_factor must be the size of tp_group, {group.size}, found {merge_factor}")
        return {name: self._joined(name, value, group) for name, value in model_state_dict.items()}

    def tp_reshard_rank_fn(
        self,
        model_state_dict: State,
        tp_group: ProcessGroup,
        dst_rank: int,
        dst_world_size: int,
        split_fc1: bool = True,
    ) -> State:
        """Join all shards, and take the part of one of ``dst_world_size`` ranks: ``tp_reshard_fn`` after 0.4.0."""
        gathered = self.tp_gather_fn(model_state_dict, tp_group, "attn", split_fc1)
        return {
            name: value if spec is None else _taken(value, spec[1], dst_rank, dst_world_size, name)
            for name, (value, spec) in gathered.items()
        }

    def tp_gather_fn(
        self,
        model_state_dict: State,
        tp_group: ProcessGroup,
        cat: str,
        split_fc1: bool = True,
        tp_gather_is_identity: bool = False,
    ) -> dict[str, tuple[Tensor, Spec]]:
        """Join all shards, and return how to cut them again. Gate and up are separate, unless ``split_fc1`` is False.

        Routed experts are not changed. ``cat`` names the ranks among which an engine cuts, for ``narrow_to_target``.
        """
        group = Group(tp_group)
        gathered: dict[str, tuple[Tensor, Spec]] = {}
        for name, value in model_state_dict.items():
            parameter = self._parameters[name]
            dim = parameter.dim
            if parameter.is_routed:
                gathered[name] = value, None
            elif dim is None:
                gathered[name] = value.clone(), None
            elif name.endswith("eh_proj.weight") and split_fc1:  # engines do not cut it
                gathered[name] = torch.cat(group.gather(value), dim), None
            elif tp_gather_is_identity:
                gathered.update((key, (part.clone(), None)) for key, part in _halves(parameter, value, split_fc1))
            else:
                for key, part in _halves(parameter, value, split_fc1):
                    gathered[key] = torch.cat(group.gather(part), dim), ("slice", dim, cat)
        return gathered

    def tpe_reshard_fn(
        self, model_state_dict: State, tpe_size: int, tpe_group: ProcessGroup, rollout_tp_size: int, dst_tp_rank: int
    ) -> State:
        """Cut routed experts for rank ``dst_tp_rank`` of ``rollout_tp_size``, gate above up. Other tensors stay."""
        routed = {name: value for name, value in model_state_dict.items() if self._parameters[name].is_routed}
        gathered = self.tpe_gather_fn(routed, tpe_size, tpe_group)
        cut = {}
        for name, (value, spec) in gathered.items():
            if spec is not None:
                parts = value.chunk(2) if spec[0] == "fused_glu" else (value,)
                dim = 0 if spec[0] == "fused_glu" else spec[1]
                value = torch.cat([_taken(part, dim, dst_tp_rank, rollout_tp_size, name) for part in parts])
            cut[name] = value
        return {name: cut.get(name, value) for name, value in model_state_dict.items()}

    def tpe_gather_fn(
        self, expert_params: State, tpe_size: int, tpe_group: ProcessGroup
    ) -> dict[str, tuple[Tensor, Spec]]:
        """Join the shards of routed experts, gate above up, and return how to cut them again."""
        gathered: dict[str, tuple[Tensor, Spec]] = {}
        for name, value in expert_params.items():
            parameter = self._parameters[name]
            dim = parameter.dim
            if dim is None:
                gathered[name] = value.clone(), None
                continue
            shards = [value] if tpe_size == 1 else Group(tpe_group).gather(value)
            parts = zip(*(shard.chunk(2) if parameter.is_gated else (shard,) for shard in shards), strict=True)
            spec = ("fused_glu", "expert_tp") if parameter.is_gated else ("slice", dim, "expert_tp")
            gathered[name] = torch.cat([shard for part in parts for shard in part], dim), spec
        return gathered

    def ep_reshard_fn(
        self, expert_params: State, rollout_ep_size: int, dst_ep_rank: int, num_moe_experts: int
    ) -> State:
        """The experts of one of ``rollout_ep_size`` ranks, each of which has consecutive experts."""
        per_rank, rest = divmod(num_moe_experts, rollout_ep_size)
        if rest:
            raise MeshError(f"rollout_ep_size must divide {num_moe_experts} experts, found {rollout_ep_size}")
        wanted = range(dst_ep_rank * per_rank, (dst_ep_rank + 1) * per_rank)
        return {name: value for name, value in expert_params.items() if self._parameters[name].expert in wanted}

    def pp_reshard_fn(self, model_state_dict: State, pp_group: ProcessGroup, dtype: torch.dtype) -> State:
        """Give every stage the tensors of single stages: the embedding, the final norm, the head. Nothing is cast."""
        group = Group(pp_group)
        own = {name: value for name, value in model_state_dict.items() if self._parameters[name].layer is None}
        by_rank = group.all_gather_object([(name, tuple(value.shape), value.dtype) for name, value in own.items()])
        result = dict(model_state_dict)
        for rank, described in enumerate(by_rank):
            for name, shape, own_dtype in described:
                held = own[name].contiguous() if rank == group.rank else None
                copy = torch.empty(shape, dtype=own_dtype, device=group.device) if held is None else held.clone()
                group.broadcast(copy, rank)
                result[name] = copy
        return result

    def convert_fn(self, state_dict: Mapping[str, Tensor]) -> State:
        """Convert the result of any of these functions to HF names and new tensors.

        Raises:
            MappingError: a name belongs to no parameter.
        """
        converted: State = {}
        for name, value in state_dict.items():
            converted.update(self._parameters[name].to_hf(value))
        return converted

    def _joined(self, name: str, value: Tensor, group: Group) -> Tensor:
        parameter = self._parameters[name]
        dim = parameter.dim
        if parameter.is_routed:
            return value
        return value.clone() if dim is None else torch.cat(group.gather(value), dim)


def _halves(parameter: Parameter, value: Tensor, split_fc1: bool) -> Sequence[tuple[str, Tensor]]:
    """Gate and up under separate names, if a parameter has both; otherwise the parameter."""
    if not (split_fc1 and parameter.is_gated):
        return [(parameter.name, value)]
    names = (parameter.name.replace("linear_fc1", part) for part in ("gate_proj", "up_proj"))
    return list(zip(names, value.chunk(2), strict=True))


def _taken(value: Tensor, dim: int, rank: int, size: int, name: str) -> Tensor:
    if value.shape[dim] % size:
        raise MeshError(f"{size} ranks must divide dim {dim} of {name}, found shape {tuple(value.shape)}")
    per_rank = value.shape[dim] // size
    return value.narrow(dim, rank * per_rank, per_rank).contiguous()
