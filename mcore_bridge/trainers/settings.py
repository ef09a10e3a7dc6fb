"""What a trainer sets on a model: mesh fields, dtypes and overrides under megatron-core's names, in one mapping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mcore_bridge.architecture import architecture_of
from mcore_bridge.config.fields import Preset
from mcore_bridge.config.moe import MTP_ON_REQUEST, layers_of
from mcore_bridge.config.parallel import ParallelDims
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.blueprint import Blueprint, draw

if TYPE_CHECKING:
    from transformers import PretrainedConfig

INITIAL = frozenset({"init_method_std"})
"""What the HF config says of values that are drawn, and a trainer may draw otherwise."""
DROPOUT = frozenset({"attention_dropout", "hidden_dropout"})
"""What is dropped while a model trains: the trainer's, whatever it was trained with before."""
OF_SOME = frozenset(
    (
        *("activation_func_clamp_value", "glu_linear_offset", "softmax_scale", "softmax_type", "no_rope_freq"),
        *("attention_output_gate", "experimental_attention_variant", "apply_residual_connection_post_layernorm"),
        *("moe_layer_freq", "moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor"),
    )
)
"""What the HF config of some families says; with the others it is megatron-core's default that computes the same."""


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


def require_same_model(asked: Blueprint) -> Blueprint:
    """``asked``, as long as no override makes another model of it than its HF config says.

    Raises:
        ConfigError: naming all that do.
    """
    known = asked.provenance
    meant = draw(
        known.folder or known.hf,
        dims=ParallelDims(),
        dtype=asked.dtype,
        device=asked.device,
        backend=asked.backend,
        head=known.head,
    )
    names = (decided(asked.hf) | OF_SOME) & asked.overrides.keys() - DROPOUT - _unread(asked)
    found = {name: (_value(asked, name), _value(meant, name)) for name in sorted(names)}
    wrong = [f"{name}={is_now!r}, where it is {was!r}" for name, (is_now, was) in found.items() if is_now != was]
    if wrong:
        raise ConfigError(
            f"these settings make another model than the HF config says: {'; '.join(wrong)}. Set them so or leave them "
            "out, or change the HF config, which engines and checkpoints go by as well"
        )
    return asked


def _value(blueprint: Blueprint, name: str) -> object:
    if name == "moe_layer_freq" and blueprint.config.num_moe_experts:
        return layers_of(vars(blueprint.config))
    value = blueprint.gpt_arguments.get(name, getattr(blueprint.config, name, None))
    return tuple(value) if isinstance(value, list) else value  # files of settings have no tuples


def _unread(asked: Blueprint) -> set[str]:
    """What makes no other model: padding; a head of its own; the size of dense MLPs where all layers have experts."""
    has_dense = not asked.config.num_moe_experts or not all(layers_of(vars(asked.config)))
    is_tied = asked.gpt_arguments["share_embeddings_and_output_weights"]
    found = {"vocab_size": True, "share_embeddings_and_output_weights": not is_tied, "ffn_hidden_size": not has_dense}
    return {name for name, is_unread in found.items() if is_unread}


def _attention_backend(name: str) -> object:
    from megatron.core.transformer.enums import AttnBackend

    if name not in AttnBackend.__members__:
        raise ConfigError(f"attention_backend must be one of {', '.join(AttnBackend.__members__)}; got {name!r}")
    return AttnBackend[name]
