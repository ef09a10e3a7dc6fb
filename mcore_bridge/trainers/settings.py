"""What a trainer sets on a model: mesh fields, dtypes and overrides under megatron-core's names, in one mapping."""

from __future__ import annotations

from collections.abc import Mapping

from mcore_bridge.config.parallel import ParallelDims
from mcore_bridge.errors import ConfigError


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


def _attention_backend(name: str) -> object:
    from megatron.core.transformer.enums import AttnBackend

    if name not in AttnBackend.__members__:
        raise ConfigError(f"attention_backend must be one of {', '.join(AttnBackend.__members__)}; got {name!r}")
    return AttnBackend[name]
