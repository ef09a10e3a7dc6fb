"""The parameters that RLinf's functions meet, by the names that they have there, with what our rules say of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_bridge.rules.layout import COLUMN, GATED_UP, QKV, REPLICATED, ROW, VOCAB, Axes, Layout
from mcore_bridge.rules.mapping import Binding
from mcore_bridge.rules.names import Numbering, canonical, expert_of, layer_of
from mcore_bridge.trainers.rlinf.rules import convertor_rules
from mcore_bridge.weights.provenance import HF, provenance_of

_PARTS = ("gate_proj", "up_proj")
DIMS: dict[Layout, int | None] = {COLUMN: 0, VOCAB: 0, QKV: 0, GATED_UP: 0, ROW: 1, REPLICATED: None}
"""The layouts that RLinf's interface can express, and the dim that each cuts."""


@dataclass(frozen=True)
class Parameter:
    """What a name stands for.

    Attributes:
        name: as RLinf has it.
        binding: its rule, by its canonical name.
        part: of ``binding.hf``, for a name that stands for gate or up alone.
        axes: sizes of heads.
        joined: shards of the trainer that make up one of the engine.
    """

    name: str
    binding: Binding
    part: int | None
    axes: Axes
    joined: int

    @property
    def is_routed(self) -> bool:
        """Whether it is of a routed expert."""
        return self.binding.axis == "etp"

    @property
    def is_gated(self) -> bool:
        """Whether a shard has gate above up."""
        return self.binding.layout == GATED_UP and self.part is None

    @property
    def layer(self) -> int | None:
        """The number of its decoder layer."""
        return layer_of(self.binding.mcore)

    @property
    def expert(self) -> int | None:
        """The number of its routed expert."""
        return expert_of(self.binding.mcore)

    @property
    def dim(self) -> int | None:
        """The dim along which it is cut; None where every rank has all of it."""
        return DIMS[self.binding.layout]

    def to_hf(self, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        """HF names and new tensors of what an engine's rank has of it."""
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
        """Those that a value was joined of, where each has gate above up; otherwise it is one."""
        return self.joined if self.is_gated and not self.is_routed else 1

    def _axes_of(self, value: Tensor) -> Axes:
        """Of a part of the heads: so many groups as are in it."""
        per_group = (self.axes["heads_per_group"] + 2) * self.axes["head_dim"]
        return {**self.axes, "tp": self._num_shards, "groups": value.shape[0] // per_group}


class Parameters:
    """All of a model, by name.

    Args:
        model_config: the trainer's ``TransformerConfig``.
        hf: the HF config or folder.
        reshard_tp_size: tensor parallel size of the engine.

    Raises:
        ConfigError: a layout is none that RLinf's interface can express.
    """

    def __init__(self, model_config: Any, hf: HF, reshard_tp_size: int) -> None:
        convertor_rules(hf)  # raises where there is none
        provenance = provenance_of(hf)
        tied, mtp = bool(provenance.hf.tie_word_embeddings), bool(model_config.mtp_num_layers)
        self._mapping = provenance.mapping(tied=tied, mtp=mtp, dialect="split")
        groups, head_dim = model_config.num_query_groups, model_config.kv_channels
        self._axes = {"heads_per_group": model_config.num_attention_heads // groups, "head_dim": head_dim}
        self._joined = max(model_config.tensor_model_parallel_size // reshard_tp_size, 1)
        layers, experts = range(model_config.num_layers), range(model_config.num_moe_experts or 0)
        self._numbering = Numbering(tuple(layers), tuple(experts), tuple(range(model_config.mtp_num_layers or 0)))
        self._known: dict[str, Parameter] = {}

    def __getitem__(self, name: str) -> Parameter:
        if name not in self._known:
            self._known[name] = self._found(name)
        return self._known[name]

    def _found(self, name: str) -> Parameter:
        whole, part = name, None
        for number, each in enumerate(_PARTS):
            if f".{each}." in name:
                whole, part = name.replace(each, "linear_fc1"), number
        binding = self._mapping.bind(canonical(whole, self._numbering))
        return Parameter(name, binding, part, self._axes, self._joined)
