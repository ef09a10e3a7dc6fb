"""Settings of trainers for a model (mesh, dtypes, overrides) in one mapping, by megatron-core's names."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from mcore_bridge.architecture import architecture_of
from mcore_bridge.config.apply_overrides import OF_SOME, same
from mcore_bridge.config.fields import Preset
from mcore_bridge.config.layer_kinds import MTP_COUNTS, counted_mtp_layers, layers_of
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.blueprint import Blueprint, BuildOptions, changes_of, make_blueprint, reconcile
from mcore_bridge.rules.names import TOWER
from mcore_bridge.weights.provenance import HF

if TYPE_CHECKING:
    from transformers import PretrainedConfig

INITIAL = frozenset({"init_method_std"})
"""Fields of the HF config for initial values. A trainer may choose others."""
DROPOUT = frozenset({"attention_dropout", "hidden_dropout"})
"""Dropout, which the trainer decides, and not the HF config."""

CONNECTIONS = (
    "vision.visual.*merger*",
    "vision.multi_modal_projector.*",
    "vision.mm_projector.*",
    "vision.vision_projection.*",
)
"""Patterns of the parameters that connect a tower to the text. Each family has parameters for one of them."""


def split(settings: Mapping[str, object], dims: ParallelDims) -> tuple[ParallelDims, dict[str, object]]:
    """Split a trainer's settings into the mesh and the overrides of ``build_model``.

    Args:
        settings: fields of ``TransformerConfig`` and arguments of ``GPTModel``. An attention backend may be given by
            its name.
        dims: the mesh for sizes that settings omit.

    Raises:
        ConfigError: no attention backend has this name.
        MeshError: a combination of sizes is impossible for any model and world size.
    """
    mesh = dims.to_config_fields()
    overrides = {name: value for name, value in settings.items() if name not in mesh}
    if isinstance(backend := overrides.get("attention_backend"), str):
        overrides["attention_backend"] = _attention_backend(backend)
    return dims.with_config_fields(settings), overrides


def with_mtp_layers(settings: Mapping[str, object], hf: PretrainedConfig) -> dict[str, object]:
    """Add the number of MTP layers of ``hf`` to settings that have a scale of the MTP loss, but no number.

    verl requests MTP layers in this way. A number of None means no MTP layers.

    Raises:
        ConfigError: ``hf`` has no such layers.
    """
    if "mtp_loss_scaling_factor" not in settings or "mtp_num_layers" in settings:
        return dict(settings)
    count = counted_mtp_layers(hf)
    if count == 0:
        raise ConfigError(
            f"mtp_loss_scaling_factor needs MTP layers: expected one of {', '.join(MTP_COUNTS)} in the HF "
            f"config of this {hf.model_type}, found none. Remove it, or set mtp_num_layers"
        )
    return {**settings, "mtp_num_layers": count}


def decided(hf: PretrainedConfig) -> frozenset[str]:
    """The names of the fields of ``TransformerConfig`` that an HF config decides."""
    fields = hf.to_dict()
    entries = (entry for entry in architecture_of(hf).fields if not isinstance(entry, Preset))
    names = frozenset(name for entry in entries for name in entry.to_mcore(fields)) - INITIAL
    return names - {"qk_layernorm"} if "kv_lora_rank" in names else names  # latents always have norms


def require_same_model(hf: HF, overrides: Mapping[str, object], **build: Any) -> dict[str, object]:
    """Check that no override contradicts the model of the HF config, and return the overrides.

    Args:
        hf: the config, or its folder.
        build: dtype, device, backend and head, as for ``build_model``.

    Raises:
        ConfigError: naming all overrides that contradict it.
    """
    blueprint = make_blueprint(hf, BuildOptions(**build))
    own = {**vars(blueprint.config), **blueprint.gpt_arguments}
    asked = {**own, **overrides}
    for name in ("kv_channels", "num_query_groups"):
        if asked[name] is None:  # megatron-core fills these in
            asked[name] = own[name]
    names = (decided(blueprint.hf) | OF_SOME) & overrides.keys() - DROPOUT - _unread(asked)
    wrong = [f"{name}={asked[name]!r}, expected {own[name]!r}" for name in sorted(names) if not same(name, asked, own)]
    if wrong:
        raise ConfigError(
            f"these settings contradict the HF config: {'; '.join(wrong)}. Use the values of the HF config or leave "
            "the settings out, or change the HF config, which engines and checkpoints use, too"
        )
    latent = {"qk_layernorm": own["qk_layernorm"]} if blueprint.config.multi_latent_attention else {}
    return {name: latent.get(name, value) for name, value in overrides.items()}


def settle_same(blueprint: Blueprint, *, overrides: Mapping[str, object] | None = None, **changed: Any) -> Blueprint:
    """Reconcile a blueprint with changes of its config, if none of them contradicts the HF config.

    Args:
        blueprint, overrides, changed: as for ``reconcile``.

    Raises:
        ConfigError, MeshError: as ``reconcile`` and ``require_same_model``.
    """
    options = blueprint.options
    dtype, head = (changed.get(name) or getattr(options, name) for name in ("dtype", "head"))
    build = {"dtype": dtype, "head": head, "device": blueprint.device, "backend": blueprint.backend}
    changes = changes_of(blueprint) if overrides is None else overrides
    checked = require_same_model(blueprint.source, {**blueprint.overrides, **changes}, **build)
    return reconcile(blueprint, overrides={name: checked[name] for name in changes}, **changed)


def parts_to_freeze(blueprint: Blueprint, *, text: bool, tower: bool, connection: bool) -> tuple[str, ...]:
    """The patterns for ``freeze=`` that freeze some parts of a composite.

    Args:
        blueprint: the blueprint of the model. Parts that are not built need no pattern.
        text: whether to freeze everything except the tower.
        tower: whether to freeze the tower without its connection to the text.
        connection: whether to freeze the connection of the tower to the text.
    """
    names = [f"{TOWER}{spec.name}" for spec in blueprint.provenance.tower]
    joints = tuple(pattern for pattern in CONNECTIONS if any(fnmatchcase(name, pattern) for name in names))
    patterns: tuple[str, ...] = ("[!v]*",) if text else ()  # any name except names in TOWER
    if tower and names:
        is_trained = blueprint.provenance.vision == "train"
        patterns += (f"{TOWER}*", *(f"!{joint}" for joint in joints if is_trained))
    return (*patterns, *(joints if connection else ()))


def _unread(asked: Mapping[str, object]) -> set[str]:
    """Settings without effect on the model: padding, an untied head, and the size of dense MLPs if there are none."""
    has_dense = not asked["num_moe_experts"] or not all(layers_of(asked))
    is_tied = asked["share_embeddings_and_output_weights"]
    unread = {"vocab_size": True, "share_embeddings_and_output_weights": not is_tied, "ffn_hidden_size": not has_dense}
    return {name for name, is_unread in unread.items() if is_unread}


def _attention_backend(name: str) -> object:
    from megatron.core.transformer.enums import AttnBackend

    if name not in AttnBackend.__members__:
        raise ConfigError(
            f"attention_backend must be one of {', '.join(AttnBackend.__members__)}, found {name!r}: choose one of them"
        )
    return AttnBackend[name]
