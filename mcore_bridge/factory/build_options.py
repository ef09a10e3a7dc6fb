"""The options of a build beside the HF config: mesh, dtype, device, modules, head and overrides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from mcore_bridge.config.mesh.parallel_dims import ParallelDims

Overrides = Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Arguments of ``build_model`` by their names, with their defaults. ``make_blueprint`` checks their values."""

    dims: ParallelDims = field(default_factory=ParallelDims)
    dtype: torch.dtype = torch.bfloat16
    device: torch.device | str | None = None
    backend: str = "auto"
    head: str = "lm"
    overrides: Overrides | None = None
    strict_config: bool = False
    vision: str = "carried"
    model: str = "gpt"
