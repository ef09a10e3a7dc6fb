"""Megatron-Bridge's classes that miles, SkyRL and AReaL import beside its bridge, implemented with this library.

Arguments of adapters that are not supported are refused, as ``create_peft`` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig as _Config
from torch import nn

from mcore_bridge.errors import ConfigError
from mcore_bridge.trainers.peft_functions import DEFAULT_TARGETS, Peft, create_peft
from mcore_bridge.weights.model_chunks import chunks_of, modules_of

_FACTORS = (".lora_A.weight", ".lora_B.weight")


class LoRA(Peft):
    """Adapters whose projections share one A for each layer of megatron-core.

    Args:
        target_modules: names of modules of megatron-core.
        dim, alpha: the rank, and the number that is divided by it to scale the adapters.
        lora_dtype: None or the dtype of the model.
        others: Megatron-Bridge's further arguments. Values that are not supported are refused, by name.

    Raises:
        ConfigError: naming all arguments that are not supported.

    Example:
        >>> LoRA(target_modules=["linear_qkv"], dim=8, alpha=16).dim
        8
    """

    kind_of_adapter = "lora"

    def __init__(
        self,
        target_modules: Sequence[str] = DEFAULT_TARGETS,
        dim: int = 32,
        alpha: float = 32,
        lora_dtype: torch.dtype | None = None,
        **others: Any,
    ) -> None:
        given = {name: value for name, value in others.items() if value or name == "dropout"}
        given |= {"type": self.kind_of_adapter, "target_modules": [*target_modules], "rank": dim, "alpha": alpha}
        self.__dict__.update(vars(create_peft(given)))
        self.lora_dtype = lora_dtype

    def __call__(self, chunks: Sequence[nn.Module], training: bool = True) -> list[nn.Module]:
        """Add the adapters to chunks, and freeze all other parameters. ``training`` is without effect."""
        dtype = chunks_of(chunks)[0].config.params_dtype
        if self.lora_dtype not in (None, dtype):
            raise ConfigError(
                f"lora_dtype must be None or the model's {dtype}, found {self.lora_dtype}: train both in one dtype"
            )
        super().__call__(chunks)
        return modules_of(chunks)

    def set_params_to_save(self, chunks: Sequence[nn.Module]) -> None:
        """Without effect: ``adapter_key_filter`` knows the names of adapters."""


class CanonicalLoRA(LoRA):
    """Like ``LoRA``, with an A for each projection. ``target_modules`` may name projections, such as ``linear_q``."""

    kind_of_adapter = "canonical_lora"


def infer_target_modules_from_adapter_weights(adapter_weight_names: Iterable[str]) -> list[str]:
    """The last parts of the names of modules with adapters, for the config of a PEFT folder.

    >>> infer_target_modules_from_adapter_weights(["model.layers.0.self_attn.q_proj.lora_A.weight"])
    ['q_proj']
    """
    names = [name.removesuffix(end) for name in adapter_weight_names for end in _FACTORS if name.endswith(end)]
    return sorted({name.rpartition(".")[2] for name in names})


def build_adapter_config_dict(
    peft_config: Peft, target_modules: list[str], base_model_name_or_path: str | None = None
) -> dict[str, Any]:
    """The config of a PEFT folder.

    Args:
        peft_config: the adapters.
        target_modules: ends of names of modules.
        base_model_name_or_path: the folder or hub name of the model.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model_name_or_path or "",
        "r": peft_config.dim,
        "lora_alpha": peft_config.alpha,
        "lora_dropout": peft_config.dropout,
        "target_modules": target_modules,
        "bias": "none",
        "inference_mode": True,
    }


@dataclass
class DistributedDataParallelConfig(_Config):
    """megatron-core's config of data parallelism."""

    def finalize(self) -> None:
        """Without effect: megatron-core checks the config where it is used."""
