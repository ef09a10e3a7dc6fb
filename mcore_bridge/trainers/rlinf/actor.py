"""Translates RLinf's ``actor`` block to arguments of ``build_model``, and compares every key with the HF config."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from mcore_bridge.architecture import read_hf, text_config
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.blueprint import Blueprint, BuildOptions, make_blueprint
from mcore_bridge.factory.modules.backend import choose_backend
from mcore_bridge.trainers.rlinf.checkpoint import checkpoint_of, config_of, hf_folder_of
from mcore_bridge.trainers.rlinf.model_keys import FROM_HF, IGNORED, KERNELS, MODEL_TYPES, dtype_of, to_mcore
from mcore_bridge.trainers.settings import decided
from mcore_bridge.weights.provenance import HF

if TYPE_CHECKING:
    from transformers import PretrainedConfig

BACKENDS = {"decoder_gpt": "auto", "te_gpt": "te", "local_gpt": "torch"}
"""The backend for each of RLinf's ``spec_name``."""
_OWN = ("precision", "model_type", "is_lora", "padded_vocab_size", "override_vocab_size", "mcore_customization_config")


@dataclass(frozen=True, kw_only=True)
class Actor:
    """The model of an ``actor`` block.

    Attributes:
        hf: the HF folder or config.
        dims, dtype, backend, overrides: as for ``build_model``.
    """

    hf: HF
    dims: ParallelDims
    dtype: torch.dtype
    backend: str = "auto"
    overrides: Mapping[str, object] = field(default_factory=dict)

    def blueprint(self, *, head: str = "lm", device: torch.device | str | None = None, model: str = "gpt") -> Blueprint:
        """Make the blueprint of the model."""
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        backend = choose_backend(self.backend, device=device)
        kernels: Set[str] = KERNELS if backend == "torch" else set()
        overrides = {name: value for name, value in self.overrides.items() if name not in kernels}
        options = BuildOptions(
            dims=self.dims,
            dtype=self.dtype,
            device=device,
            backend=backend,
            head=head,
            overrides=overrides,
            model=model,
        )
        return make_blueprint(self.hf, options)


def read_actor(
    actor: Mapping[str, Any], *, hf: HF | None = None, overrides: Mapping[str, object] | None = None
) -> Actor:
    """Read an ``actor`` block (of dicts, or OmegaConf's), before or after RLinf has filled it in from the HF config.

    Args:
        actor: the block, with ``model``, and optionally with ``megatron``, ``mcore_gpt`` and ``spec_name``.
        hf: the HF folder or config. None means the config in or beside the checkpoint that Megatron loads, or else
            ``model.model_path``, or ``hf_model_path`` of the convertor's block.
        overrides: values that replace values of the HF config, by megatron-core's names, like
            ``model.mcore_customization_config``.

    Raises:
        ConfigError: naming every key that is unknown, or that contradicts the HF config and is no override.
        MeshError: the sizes do not fit each other, or the model.
    """
    if not actor.get("mcore_gpt", True):
        raise ConfigError(
            "mcore_gpt must be True, found False: the GPTModel of megatron.legacy is another class, whose parameters "
            "have other names and layouts; remove the key"
        )
    spec_name = actor.get("spec_name") or "decoder_gpt"
    if spec_name not in BACKENDS:
        raise ConfigError(f"spec_name must be one of {sorted(BACKENDS)}, found {spec_name!r}")
    model = dict(actor["model"])
    _require_resolved(model)
    chosen: dict[str, object] = {**(model.get("mcore_customization_config") or {}), **(overrides or {})}
    hf = _folder(actor) if hf is None else hf
    config = text_config(read_hf(hf))
    says = to_mcore({key: value for key, value in model.items() if key not in _OWN and value is not None})
    read = Actor(
        hf=hf,
        dims=_dims(model),
        dtype=dtype_of(model.get("precision")),
        backend=BACKENDS[spec_name],
        overrides={**_free(config, model, says), **chosen},
    )
    _require_same(read.blueprint(), config, model, says, chosen)
    return read


def _folder(actor: Mapping[str, Any]) -> str:
    """The folder of the HF config. A checkpoint that Megatron loads has its own config; the HF folder may be gone."""
    checkpoint, hf = checkpoint_of(actor), hf_folder_of(actor)
    _require_resolved({"the checkpoint of Megatron": checkpoint, "hf_model_path": hf})
    folder = (config_of(checkpoint) if checkpoint is not None else None) or hf
    if folder is None:
        raise ConfigError(
            "expected model.model_path, hf_model_path in the convertor's block, or a config.json in or beside what "
            f"Megatron loads ({checkpoint}), found none of them; pass hf="
        )
    return str(folder)


def _require_resolved(block: Mapping[str, Any]) -> None:
    for key, value in block.items():
        if isinstance(value, str) and "${" in value and key not in IGNORED:
            raise ConfigError(f"{key} must be a value, found {value!r}: resolve the config first, as OmegaConf does")


def _dims(model: Mapping[str, Any]) -> ParallelDims:
    """The mesh of the block. As in ``parallel_state``, the default size for experts is the tensor parallel size."""
    given = {key: value for key, value in model.items() if value is not None}
    return ParallelDims().with_config_fields({"expert_tensor_parallel_size": None, **given})


def _free(config: PretrainedConfig, model: Mapping[str, Any], says: Mapping[str, Any]) -> dict[str, object]:
    """The settings of the block that the HF config does not decide."""
    taken = decided(config)
    free = {name: value for name, value in says.items() if name not in taken and name not in FROM_HF}
    for key in ("padded_vocab_size", "override_vocab_size"):
        if model.get(key) not in (None, config.vocab_size):
            free["vocab_size"] = model[key]
    return free


def _require_same(
    blueprint: Blueprint,
    config: PretrainedConfig,
    model: Mapping[str, Any],
    says: Mapping[str, Any],
    chosen: Mapping[str, object],
) -> None:
    """Raise ``ConfigError`` with all settings of the block that contradict the HF config."""
    taken, wrong = decided(config), []
    for name, value in says.items():
        own = blueprint.gpt_arguments.get(name, getattr(blueprint.config, name, None))
        if name in taken and name not in chosen and value != own:
            wrong.append(f"{name}={value!r}, expected {own!r}")
    known = MODEL_TYPES.get(model.get("model_type") or "", (config.model_type,))
    if config.model_type not in known:
        wrong.append(f"model_type={model['model_type']!r}, expected {config.model_type!r}")
    if model.get("is_lora"):
        wrong.append("is_lora=True, but no adapter is built")
    if wrong:
        raise ConfigError(
            f"the actor's model block contradicts the HF config: {'; '.join(wrong)}. Remove these keys, or pass "
            "overrides"
        )
