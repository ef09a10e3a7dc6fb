"""Reconciles a blueprint with its config, which trainers change in place before they build.

A changed field is treated like an override: it passes the same checks, and values that follow from it are set on the
same config object. Attributes that neither megatron-core nor this library uses do not change.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mcore_bridge.config.overrides import gpt_argument_names
from mcore_bridge.factory.blueprint import Blueprint, make_blueprint
from mcore_bridge.factory.build_options import Overrides

_SPECS = frozenset({"transformer_layer_spec", "mtp_block_spec"})


def reconcile(blueprint: Blueprint, *, overrides: Overrides | None = None, **changed: Any) -> Blueprint:
    """The blueprint for the changed config. It keeps the config object.

    Args:
        blueprint: from ``make_blueprint``, or from this function.
        overrides: the changes of the config. None: the result of ``changes_of``.
        changed: other build options. None: the options of the blueprint.

    Raises:
        ConfigError, MeshError: as for ``make_blueprint``.
    """
    changes = changes_of(blueprint) if overrides is None else overrides
    options = replace(blueprint.options, **{name: value for name, value in changed.items() if value is not None})
    if not changes and options == blueprint.options:
        return blueprint
    options = replace(
        options,
        device=blueprint.device,
        backend=blueprint.backend,
        overrides={**(options.overrides or {}), **changes},
        strict_config=False,
    )
    settled = make_blueprint(blueprint.source, options)
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
