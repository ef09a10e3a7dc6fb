"""The settings of a trainer for a mesh: the YAML of verl or NeMo-RL, or slime's arguments."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rich.text import Text

from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.config.mesh.spellings import OVERRIDES, SECTIONS
from mcore_bridge.errors import MeshError

TRAINERS = (*SECTIONS, "slime")


def settings_for(trainer: str, dims: ParallelDims, num_layers: int) -> dict[str, Any]:
    """The settings as nested objects. ``ParallelDims.from_dict`` reads them.

    Args:
        trainer: one of ``TRAINERS``.
        dims: the mesh, with an explicit layout.
        num_layers: the layers of the model.

    Raises:
        MeshError: the trainer has no setting for the split of the pipeline.
    """
    fields = dims.to_config_fields()
    sizes = {name: fields[name] for name in dims.to_group_sizes() if fields[name] is not None}
    sizes["sequence_parallel"] = dims.sp
    split = {name: value for name, value in fields.items() if name not in sizes and value not in (None, False)}
    if trainer == "nemo-rl":
        sizes |= _two_ends(dims, num_layers)
    elif trainer == "verl" and split:
        sizes[OVERRIDES] = split
    else:
        sizes |= split
    for key in reversed(SECTIONS.get(trainer, ())):
        sizes = {key: sizes}
    return sizes


def render(trainer: str, settings: Mapping[str, Any]) -> Text:
    """The settings as text, to copy into a file or a command line."""
    if trainer == "slime":
        flags = ((f"--{name.replace('_', '-')}", value) for name, value in settings.items() if value is not False)
        lines = " \\\n".join(flag if value is True else f"{flag} {json.dumps(value)}" for flag, value in flags)
    else:
        lines = "\n".join(_yaml(settings))
    return Text(lines)


def _two_ends(dims: ParallelDims, num_layers: int) -> dict[str, int]:
    """The split for NeMo-RL, which has the numbers of layers in the first and in the last stage, and no layout."""
    if dims.pp == 1:
        return {}
    first, *middle, last = counts = [len(stage.layers) for stage in dims.stages(num_layers)]
    if dims.vp > 1 or len({*middle}) > 1:
        raise MeshError(f"NeMo-RL must have equal stages between the first and the last, found {counts}: change pp")
    if len({*counts}) == 1:
        return {}
    return {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}


def _yaml(settings: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from _yaml(value, f"{indent}  ")
        else:
            yield f"{indent}{name}: {json.dumps(value)}"
