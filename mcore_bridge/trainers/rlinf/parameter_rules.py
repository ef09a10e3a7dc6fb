"""Finds our rule for each parameter that RLinf's functions name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_bridge.rules.layout import COLUMN, GATED_UP, QKV, REPLICATED, ROW, VOCAB, Axes, Layout
from mcore_bridge.rules.mapping import Binding
from mcore_bridge.rules.names import Numbering, expert_of, layer_of
from mcore_bridge.trainers.one_parameter import binding_of
from mcore_bridge.trainers.rlinf.rules import convertor_rules
from mcore_bridge.weights.provenance import HF, provenance_of

_PARTS = ("gate_proj", "up_proj")
DIMS: dict[Layout, int | None] = {COLUMN: 0, VOCAB: 0, QKV: 0, GATED_UP: 0, ROW: 1, REPLICATED: None}
"""The layouts that RLinf's interface can express, with the dim that each layout cuts."""


@dataclass(frozen=True)
class Parameter:
    """One parameter, or one of gate and up.

    Attributes:
        name: RLinf's name.
        binding: the rule for its canonical name.
        part: the index in ``binding.hf``, if the name means only gate or only up.
        axes: sizes of heads.
        joined: the number of the trainer's shards that make up one of the engine.
    """

    name: str
    binding: Binding
    part: int | None
    axes: Axes
    joined: int

    @property
    def is_routed(self) -> bool:
        """Whether it belongs to a routed expert."""
        return self.binding.axis == "etp"

    @property
    def is_gated(self) -> bool:
        """Whether a shard has gate above up."""
        return self.binding.layout == GATED_UP and self.part is None

    @property
    def layer(self) -> int | None:
        """The number of its decoder layer, if it has one."""
        return layer_of(self.binding.mcore)

    @property
    def expert(self) -> int | None:
        """The number of its routed expert, if it has one."""
        return expert_of(self.binding.mcore)

    @property
    def dim(self) -> int | None:
        """The dim along which it is cut; None if every rank has all of it."""
        return DIMS[self.binding.layout]

    def to_hf(self, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield HF names and new tensors for ``value``, a rank's part of the parameter."""
        if not self.binding.exported:
            return
        names = self.binding.hf
        parts: tuple[Tensor, ...] = (value,)
        if self.part is not None:
            names = names[self.part : self.part + 1]
        elif len(names) > 1:
            parts = (~self.binding.layout)((torch.stack(value.chunk(self._num_shards)),), self._axes_of(value))
        for name, part in zip(names, parts, strict=True):
            yield name, part.clone(memory_format=torch.contiguous_format)

    @property
    def _num_shards(self) -> int:
        """The number of shards in a joined value, if each has gate above up; otherwise 1."""
        return self.joined if self.is_gated and not self.is_routed else 1

    def _axes_of(self, value: Tensor) -> Axes:
        """The sizes for a value with some of the heads: as many groups as it has."""
        per_group = (self.axes["heads_per_group"] + 2) * self.axes["head_dim"]
        return {**self.axes, "tp": self._num_shards, "groups": value.shape[0] // per_group}


class Parameters:
    """All parameters of a model, by name.

    Args:
        model_config: the trainer's ``TransformerConfig``.
        hf: the HF config or folder.
        reshard_tp_size: tensor parallel size of the engine.

    Raises:
        ConfigError: RLinf's interface cannot express a layout.
    """

    def __init__(self, model_config: Any, hf: HF, reshard_tp_size: int) -> None:
        convertor_rules(hf)  # raises for such a layout
        provenance = provenance_of(hf)
        tied, mtp = bool(provenance.hf.tie_word_embeddings), model_config.mtp_num_layers or 0
        self._mapping = provenance.mapping(tied=tied, mtp=mtp, expert_format="split")
        groups, head_dim = model_config.num_query_groups, model_config.kv_channels
        self._axes = {"heads_per_group": model_config.num_attention_heads // groups, "head_dim": head_dim}
        self._joined = max(model_config.tensor_model_parallel_size // reshard_tp_size, 1)
        layers, experts = range(model_config.num_layers), range(model_config.num_moe_experts or 0)
        self._numbering = Numbering(tuple(layers), tuple(experts), tuple(range(model_config.mtp_num_layers or 0)))
        self._known: dict[str, Parameter] = {}

    def __getitem__(self, name: str) -> Parameter:
        if name not in self._known:
            self._known[name] = self._parameter(name)
        return self._known[name]

    def _parameter(self, name: str) -> Parameter:
        whole, part = name, None
        for number, half in enumerate(_PARTS):
            if f".{half}." in name:
                whole, part = name.replace(half, "linear_fc1"), number
        binding = binding_of(whole, self._mapping, self._numbering, "MegatronCoreWeightReshard")
        return Parameter(name, binding, part, self._axes, self._joined)
