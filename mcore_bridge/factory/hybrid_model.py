"""Builds a chunk that is megatron-core's ``HybridModel``: each of its layers is half of an HF layer.

A string has one letter for each half.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mcore_bridge.config.layer_kinds import SECOND, inner_letters, letters_of
from mcore_bridge.factory.mtp_specs import mtp_block_spec
from mcore_bridge.rules.hybrid_keys import HalfKeys

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    from mcore_bridge.config.mesh.pipeline import Stage
    from mcore_bridge.factory.blueprint import Blueprint

_SLOTS = {
    "M": "mamba_layer",
    "G": "gdn_layer",
    "*": "attention_layer",
    "D": "dsa_layer",
    "+": "mla_layer",
    "-": "mlp_layer",
    "E": "moe_layer",
}
"""megatron-core's letters of layers, each with the field of its spec."""
_STAGES = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")


def pattern_of(blueprint: Blueprint) -> str:
    """The string of the layers of a ``HybridModel``, such as ``"*-*-|*E*E"`` for two stages.

    Each token that MTP layers predict adds the layers within one, such as ``"/*E"``.
    """
    config = blueprint.config
    letters = letters_of(config)
    decoder = "|".join("".join(letters[layer] for layer in stage.layers) for stage in blueprint.stages)
    return "/".join([decoder, *[inner_letters(config)] * (config.mtp_num_layers or 0)])


def build_hybrid(blueprint: Blueprint, stage: Stage, groups: ProcessGroupCollection) -> Any:
    """The ``HybridModel`` of a stage."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    # it has no scaling of the rope; we replace the rope anyway
    known = inspect.signature(HybridModel.__init__).parameters
    with _cut_by_pattern(blueprint.config):
        return HybridModel(
            config=blueprint.config,
            hybrid_stack_spec=stack_spec(blueprint, stage),
            hybrid_layer_pattern=pattern_of(blueprint),
            pre_process=stage.embedding,
            post_process=stage.loss,
            vp_stage=blueprint.vp_stage(stage),
            pg_collection=groups,
            **{name: value for name, value in blueprint.gpt_arguments.items() if name in known},
        )


def stack_spec(blueprint: Blueprint, stage: Stage) -> Any:
    """The spec of a stack, with one spec for each kind of layer, from the first such layer in the stage."""
    from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    from mcore_bridge.factory.modules.hybrid_stack import HalvesStack

    letters = letters_of(blueprint.config)
    keys = HalfKeys(letters)
    own: dict[str, Any] = {}
    for layer in stage.layers:
        for kind in letters[layer]:
            if _SLOTS[kind] not in own:
                (spec,) = blueprint.block_spec(range(layer, layer + 1)).layer_specs
                own[_SLOTS[kind]] = _half_spec(spec, kind, numbers=keys.layers)
    if held := blueprint.mtp_layers(stage):
        own["mtp_block_spec"] = _mtp_spec(blueprint, held)
    norm = blueprint.block_spec(range(0)).layer_norm
    return ModuleSpec(HalvesStack, params={"norm": norm, "keys": keys}, submodules=HybridStackSubmodules(**own))


def _half_spec(spec: Any, kind: str, **params: Any) -> Any:
    """The spec of one half of a layer, from the spec of the layer, which is changed."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    from mcore_bridge.factory.modules.half_layers import remove_first, remove_second
    from mcore_bridge.factory.modules.hybrid_stack import half_of

    (remove_first if kind in SECOND else remove_second)(spec.submodules)
    return ModuleSpec(half_of(spec.module), {**spec.params, **params}, spec.submodules)


def _mtp_spec(blueprint: Blueprint, held: int) -> Any:
    """The spec of MTP layers, with the specs of the halves of the layer within. MLPs are marked as MTP's."""
    from mcore_bridge.factory.modules.hybrid_stack import HalvesMtpLayer

    letters = inner_letters(blueprint.config)
    params = {kind: {"is_mtp_layer": True} if kind in SECOND else {} for kind in letters}
    halves = {_SLOTS[kind]: _half_spec(blueprint.inner_spec(), kind, **params[kind]) for kind in letters}
    keys = HalfKeys((letters,))
    own: dict[str, Any] = {"layer": HalvesMtpLayer, "halves": halves, "keys": keys}
    return mtp_block_spec(None, held, config=blueprint.config, backend=blueprint.backend, **own)


@contextmanager
def _cut_by_pattern(config: TransformerConfig) -> Iterator[None]:
    """Hide the sizes of the first and the last stage, which ``HybridModel`` refuses together with ``|``."""
    kept = {name: getattr(config, name) for name in _STAGES}
    vars(config).update(dict.fromkeys(_STAGES))
    try:
        yield
    finally:
        vars(config).update(kept)
