"""Reconciles a blueprint with its config, which trainers change in place before they build.

A changed field is treated like an override: it passes the same checks, and values that follow from it are set on the
same config object. Attributes that neither megatron-core nor we know stay as they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mcore_bridge.config.overrides import gpt_argument_names
from mcore_bridge.factory.blueprint import Blueprint, Overrides, make_blueprint

if TYPE_CHECKING:
    import torch

    from mcore_bridge.config.mesh.parallel_dims import ParallelDims

_SPECS = frozenset({"transformer_layer_spec", "mtp_block_spec"})


def reconcile(
    blueprint: Blueprint,
    *,
    dims: ParallelDims | None = None,
    dtype: torch.dtype | None = None,
    head: str | None = None,
    overrides: Overrides | None = None,
    vision: str | None = None,
    model: str | None = None,
) -> Blueprint:
    """The blueprint for the changed config. It keeps the same config object.

    Args:
        blueprint: from ``make_blueprint``, or from here.
        dims, dtype, head, vision, model: new ones. None: those of the blueprint.
        overrides: the changes of the config. None: all that ``changes_of`` finds.

    Raises:
        ConfigError, MeshError: as for ``make_blueprint``.
    """
    known = blueprint.provenance
    changes = changes_of(blueprint) if overrides is None else overrides
    dims, dtype, head = dims or blueprint.dims, dtype or blueprint.dtype, head or known.head
    vision, model = vision or known.vision, model or blueprint.model
    before = (blueprint.dims, blueprint.dtype, known.head, known.vision, blueprint.model)
    if not changes and (dims, dtype, head, vision, model) == before:
        return blueprint
    settled = make_blueprint(
        blueprint.source,
        dims=dims,
        dtype=dtype,
        device=blueprint.device,
        backend=blueprint.backend,
        head=head,
        overrides={**blueprint.overrides, **changes},
        vision=vision,
        model=model,
    )
    held = vars(blueprint.config)
    held.update(vars(settled.config))
    held.update({name: value for name, value in settled.gpt_arguments.items() if name in held})
    return replace(settled, config=blueprint.config)


def changes_of(blueprint: Blueprint) -> dict[str, object]:
    """Values that were set on the config after it was made: fields, ``GPTModel`` arguments, our attributes, specs."""
    before = {**blueprint.initial, **blueprint.gpt_arguments}
    names = before.keys() | gpt_argument_names() | _SPECS
    now = {name: value for name, value in vars(blueprint.config).items() if name in names}
    return {name: value for name, value in now.items() if name not in before or _differ(value, before[name])}


def _differ(value: object, before: object) -> bool:
    return value is not before and value != before
