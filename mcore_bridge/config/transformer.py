"""Turns an HF config into a ``TransformerConfig`` and ``GPTModel`` arguments by a config table, and back.

The table decides first, then the mesh and the dtype, then overrides. No value is dropped: each name is a field of the
installed ``TransformerConfig``, an argument of ``GPTModel``, or an attribute of ours.
"""

from collections import ChainMap
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from mcore_bridge.config.fields import Field, count, require_ranges, to_hf, to_mcore
from mcore_bridge.config.mesh.divisibility import check_model
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.config.overrides import (
    ATTRIBUTES,
    config_class,
    config_fields,
    gpt_argument_names,
    require_activation,
    require_chosen_experts,
    require_known,
    require_layers,
    require_overridable,
    require_parameters,
    require_vocab,
)
from mcore_bridge.config.rope import Rope
from mcore_bridge.config.unread_fields import without_unread
from mcore_bridge.errors import ConfigError

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from transformers import PretrainedConfig

BUILDABLE = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes in which megatron-core builds models."""
_OF_OUR_ROUTER = frozenset({"moe_router_enable_expert_bias"})
"""Fields to set after ``TransformerConfig`` is made: it refuses them with softmax scores, but our router allows these.
"""


def to_transformer_config(
    hf: "PretrainedConfig",
    table: tuple[Field, ...],
    *,
    dims: ParallelDims | None = None,
    dtype: torch.dtype = torch.bfloat16,
    overrides: Mapping[str, object] | None = None,
) -> "TransformerConfig":
    """The ``TransformerConfig`` of an HF config, with the attributes of ``ATTRIBUTES`` set on it.

    Args:
        hf: the config, as ``read_config`` gives it.
        table: the fields of its architecture.
        dims: the mesh. None: a single rank.
        dtype: of parameters and of messages between pipeline stages: float32, bfloat16 or float16.
        overrides: ``TransformerConfig`` fields and ``GPTModel`` arguments by name. They are applied last.

    Raises:
        ConfigError: a field, value or override cannot be expressed exactly, or mcore refuses the result.
        MeshError: ``dims`` do not divide this model.
    """
    dims = dims or ParallelDims()
    settings = settings_of(hf, table, dims=dims, overrides=overrides)
    latent = _is_latent(settings)
    names = config_fields(latent=latent)
    settings |= {**_dtype_fields(dtype), **_only(overrides or {}, names)}
    require_ranges({}, (), settings)
    check_model(dims, settings)
    ours = _OF_OUR_ROUTER if "router_norm_min" in settings else frozenset()
    if by_layer := bool(settings.get("per_layer_config")):
        settings["heterogeneous_block_specs"] = True
    try:
        config = config_class(latent=latent, by_layer=by_layer)(**_only(settings, names - ours))
    except (ArithmeticError, AssertionError, ImportError, TypeError, ValueError) as error:
        raise ConfigError(f"megatron-core refuses this configuration: {error}") from error
    for name in (ATTRIBUTES | ours) & settings.keys():
        setattr(config, name, settings[name])
    return config


def to_gpt_arguments(
    hf: "PretrainedConfig",
    table: tuple[Field, ...],
    *,
    dims: ParallelDims | None = None,
    overrides: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """The arguments of ``GPTModel`` that the config decides; ``vocab_size`` is padded to a multiple of ``tp``.

    Raises:
        ConfigError: as for ``to_transformer_config``.
    """
    settings = settings_of(hf, table, dims=dims or ParallelDims(), overrides=overrides)
    return _only(settings, gpt_argument_names())


def to_hf_config(
    config: "TransformerConfig", gpt_arguments: Mapping[str, object], table: tuple[Field, ...]
) -> dict[str, object]:
    """The inverse of the functions above: the HF fields that ``table`` maps, by the installed transformers' names.

    Raises:
        ConfigError: the config is not of this architecture, or an override gave it a value that HF cannot express.
    """
    return to_hf(table, ChainMap(dict(gpt_arguments), dict(vars(config))))


def settings_of(
    hf: "PretrainedConfig", table: tuple[Field, ...], *, dims: ParallelDims, overrides: Mapping[str, object] | None
) -> dict[str, object]:
    """Every value that table, mesh and overrides decide, by its name in mcore."""
    overrides = dict(overrides or {})
    mesh_fields = dims.to_config_fields()
    settings = {**to_mcore(table, without_unread(hf, table)), **mesh_fields}
    latent = _is_latent(settings)
    require_overridable(overrides, decided=mesh_fields.keys(), latent=latent)
    if isinstance(vocab_size := settings.get("vocab_size"), int):
        settings["vocab_size"] = -(-vocab_size // dims.tp) * dims.tp
        require_vocab(overrides.get("vocab_size", settings["vocab_size"]), at_least=vocab_size, tp=dims.tp)
    settings |= overrides
    if _is_latent(settings) != latent:
        raise ConfigError(f"multi_latent_attention must be {latent}, as in the HF model. Remove the override.")
    if settings.get("num_query_groups", 1) is None:  # mcore replaces None by this
        settings["num_query_groups"] = settings["num_attention_heads"]
    if settings.get("kv_channels", 1) is None:  # resolved here too, because the rope needs it
        hidden_size, heads = count(settings, "hidden_size"), count(settings, "num_attention_heads")
        overrides["kv_channels"] = settings["kv_channels"] = hidden_size // heads
    if isinstance(rope := settings.get("hf_rope"), Rope):
        settings |= _latent_rope(rope, overrides) if latent else _rope_settings(rope.overridden(overrides), settings)
    if isinstance(sliding := settings.get("hf_sliding_rope"), Rope):
        settings["hf_sliding_rope"] = sliding.overridden(_only(overrides, frozenset({"kv_channels"})))
    for name in ("hf_rope", "hf_sliding_rope"):
        _require_fusible(settings.get(name), settings, latent=latent)
    require_activation(settings)
    require_layers(settings)
    require_chosen_experts(settings)
    require_parameters(settings)
    require_known(settings, latent=latent)
    return settings


def _rope_settings(rope: Rope, settings: Mapping[str, object]) -> dict[str, object]:
    for name, value in (("position_embedding_type", "rope"), ("rotary_percent", rope.partial_rotary_factor)):
        if settings[name] != value:
            raise ConfigError(
                f"{name} must be {value!r}, as in the HF model, found {settings[name]!r}. Remove the override."
            )
    return {"hf_rope": rope, "rotary_base": rope.theta, **rope.to_mcore()}


def _require_fusible(rope: object, settings: Mapping[str, object], *, latent: bool) -> None:
    """Refuse fused kernels that would compute another rope."""
    if not isinstance(rope, Rope) or not settings.get("apply_rope_fusion"):
        return
    reasons = []
    if rope.is_dynamic:
        reasons.append("frequencies depend on the length of each sequence, and the fused kernel has one set of them")
    if rope.to_mcore() and not latent:
        reasons.append(f"the fused kernel drops the attention factor of {rope.attention_factor} for packed sequences")
    if reasons:
        raise ConfigError(
            f"apply_rope_fusion must be False for this rope, found True: {'; '.join(reasons)}. Remove the override."
        )


def _latent_rope(rope: Rope, overrides: Mapping[str, object]) -> dict[str, object]:
    rope = rope.overridden({**overrides, "kv_channels": overrides.get("qk_pos_emb_head_dim")})
    fields = {**rope.to_latent(), "position_embedding_type": "rope", "rotary_percent": 1.0}
    for name in fields.keys() & overrides.keys():
        if overrides[name] != fields[name]:
            raise ConfigError(
                f"{name} must be {fields[name]!r}, as in the HF model, found {overrides[name]!r}. Remove the override, "
                "or change the rope of the HF config."
            )
    return {"hf_rope": rope, "rotary_base": rope.theta, **fields}


def _is_latent(settings: Mapping[str, object]) -> bool:
    return bool(settings.get("multi_latent_attention"))


def _dtype_fields(dtype: torch.dtype) -> dict[str, object]:
    if dtype not in BUILDABLE:
        raise ConfigError(f"dtype must be torch.float32, torch.bfloat16 or torch.float16, found {dtype!r}.")
    halves = {"bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16}
    return {**halves, "params_dtype": dtype, "pipeline_dtype": dtype}


def _only(settings: Mapping[str, object], names: frozenset[str]) -> dict[str, object]:
    return {name: value for name, value in settings.items() if name in names}
