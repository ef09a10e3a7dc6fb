"""What a trainer sets on a model: mesh fields, dtypes and overrides under megatron-core's names, in one mapping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mcore_bridge.architecture import architecture_of
from mcore_bridge.config.effective import OF_SOME, same
from mcore_bridge.config.fields import Preset
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.config.tables.moe import MTP_ON_REQUEST, layers_of
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.blueprint import Blueprint, make_blueprint
from mcore_bridge.factory.reconcile import changes_of, reconcile
from mcore_bridge.weights.provenance import HF

if TYPE_CHECKING:
    from transformers import PretrainedConfig

INITIAL = frozenset({"init_method_std"})
"""What the HF config says of values that are drawn, and a trainer may draw otherwise."""
DROPOUT = frozenset({"attention_dropout", "hidden_dropout"})
"""What is dropped while a model trains: the trainer's, whatever it was trained with before."""


def split(settings: Mapping[str, object], dims: ParallelDims) -> tuple[ParallelDims, dict[str, object]]:
    """A trainer's settings as the mesh and the overrides of ``build_model``.

    Args:
        settings: fields of ``TransformerConfig`` and arguments of ``GPTModel``; a name of an attention backend may
            stand for the backend.
        dims: the mesh where settings say nothing.

    Raises:
        ConfigError: no attention backend has this name.
        MeshError: for a combination that no model and no world size can make right.
    """
    mesh = dims.to_config_fields()
    overrides = {name: value for name, value in settings.items() if name not in mesh}
    if isinstance(backend := overrides.get("attention_backend"), str):
        overrides["attention_backend"] = _attention_backend(backend)
    return dims.with_config_fields(settings), overrides


def with_mtp_layers(settings: Mapping[str, object], hf: PretrainedConfig) -> dict[str, object]:
    """``settings`` with as many MTP layers as ``hf`` says, where they scale the loss of such layers and count none.

    That is how verl asks for them; a count of None is none.

    Raises:
        ConfigError: ``hf`` says nothing of such layers.
    """
    if "mtp_loss_scaling_factor" not in settings or "mtp_num_layers" in settings:
        return dict(settings)
    count = max(getattr(hf, name, None) or 0 for name in MTP_ON_REQUEST.names)
    if count == 0:
        raise ConfigError(
            f"mtp_loss_scaling_factor needs MTP layers: expected one of {', '.join(MTP_ON_REQUEST.names)} in the HF "
            f"config of this {hf.model_type}, found none. Remove it, or set mtp_num_layers"
        )
    return {**settings, "mtp_num_layers": count}


def decided(hf: PretrainedConfig) -> frozenset[str]:
    """The names that an HF config decides."""
    fields = hf.to_dict()
    table = (each.to_mcore(fields) for each in architecture_of(hf).fields if not isinstance(each, Preset))
    names = frozenset(name for found in table for name in found) - INITIAL
    return names - {"qk_layernorm"} if "kv_lora_rank" in names else names  # latents have norms, whatever this says


def require_same_model(hf: HF, overrides: Mapping[str, object], **build: Any) -> dict[str, object]:
    """``overrides``, as long as none makes another model of an HF config than it says.

    Args:
        hf: the config, or its folder.
        build: dtype, device, backend and head, as for ``make_blueprint``.

    Raises:
        ConfigError: naming all that do.
    """
    meant = make_blueprint(hf, dims=ParallelDims(), **build)
    held = {**vars(meant.config), **meant.gpt_arguments}
    asked = {**held, **overrides}
    for name in ("kv_channels", "num_query_groups"):
        if asked[name] is None:  # which megatron-core fills in
            asked[name] = held[name]
    names = (decided(meant.hf) | OF_SOME) & overrides.keys() - DROPOUT - _unread(asked)
    wrong = [
        f"{name}={asked[name]!r}, where it is {held[name]!r}" for name in sorted(names) if not same(name, asked, held)
    ]
    if wrong:
        raise ConfigError(
            f"these settings make another model than the HF config says: {'; '.join(wrong)}. Set them so or leave them "
            "out, or change the HF config, which engines and checkpoints go by as well"
        )
    latent = {"qk_layernorm": held["qk_layernorm"]} if meant.config.multi_latent_attention else {}
    return {name: latent.get(name, value) for name, value in overrides.items()}


def settle_same(blueprint: Blueprint, *, overrides: Mapping[str, object] | None = None, **changed: Any) -> Blueprint:
    """``reconcile``, as long as no change makes another model. Arguments are the same, errors also those of above."""
    dtype, head = (changed.get(name) for name in ("dtype", "head"))
    own = {"dtype": dtype or blueprint.dtype, "head": head or blueprint.provenance.head}
    placed = {"device": blueprint.device, "backend": blueprint.backend}
    changes = changes_of(blueprint) if overrides is None else overrides
    hf = blueprint.provenance.folder or blueprint.origin
    checked = require_same_model(hf, {**blueprint.overrides, **changes}, **own, **placed)
    return reconcile(blueprint, overrides={name: checked[name] for name in changes}, **changed)


def _unread(asked: Mapping[str, object]) -> set[str]:
    """What makes no other model: padding; a head of its own; the size of dense MLPs where all layers have experts."""
    has_dense = not asked["num_moe_experts"] or not all(layers_of(asked))
    is_tied = asked["share_embeddings_and_output_weights"]
    found = {"vocab_size": True, "share_embeddings_and_output_weights": not is_tied, "ffn_hidden_size": not has_dense}
    return {name for name, is_unread in found.items() if is_unread}


def _attention_backend(name: str) -> object:
    from megatron.core.transformer.enums import AttnBackend

    if name not in AttnBackend.__members__:
        raise ConfigError(f"attention_backend must be one of {', '.join(AttnBackend.__members__)}; got {name!r}")
    return AttnBackend[name]
