"""Megatron-Bridge's functions for adapters, as verl calls them, implemented with this library.

Megatron-Bridge ignores unknown keys, so a typo has no effect there. Here each key is used, left to verl, or refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mcore_bridge.arguments import is_count
from mcore_bridge.config.fields import is_dropout, is_number
from mcore_bridge.errors import ConfigError
from mcore_bridge.factory.adapter_sets import without_adapters
from mcore_bridge.factory.add_adapters import Init, add_adapters
from mcore_bridge.rules.adapters import Sharing, is_adapter
from mcore_bridge.rules.mapping import Rules
from mcore_bridge.rules.names import TOWER
from mcore_bridge.weights.bound import provenance_on
from mcore_bridge.weights.dist_checkpoint.checkpoint import load_checkpoint
from mcore_bridge.weights.model_tensors import held_tensors
from mcore_bridge.weights.peft.hf_adapters import load_adapters
from mcore_bridge.weights.peft.peft_config import CONFIG

if TYPE_CHECKING:
    from mcore_bridge.trainers.provider import Hook

Models = Sequence[nn.Module]

KINDS: dict[str, Sharing] = {"lora": "shared", "canonical_lora": "own"}
"""Types of adapters, and whether the projections of a layer share one A."""
PARTS = {
    "linear_q": ("linear_qkv", 0, 3),
    "linear_k": ("linear_qkv", 1, 3),
    "linear_v": ("linear_qkv", 2, 3),
    "linear_fc1_gate": ("linear_fc1", 0, 2),
    "linear_fc1_up": ("linear_fc1", 1, 2),
}
"""Names of single projections: the layer of mcore that joins them, the position in it, and how many it joins."""
MUST_BE: dict[str, tuple[object, ...]] = {
    "type": tuple(KINDS),
    "exclude_modules": ([], None),
    "lora_A_init_method": ("xavier", "normal", "kaiming"),
    "lora_B_init_method": ("zero",),
    "a2a_experimental": (False,),
    "dropout_position": ("pre", "post"),
    **dict.fromkeys(("freeze_vision_model", "freeze_vision_projection", "freeze_language_model"), (True,)),
}
"""The supported values of keys for which other values exist."""
KEYS = {
    *(*MUST_BE, "rank", "alpha", "dropout", "target_modules", "dtype", "adapter_path", "merge", "fully_sharded_loras"),
}
"""All keys. The trainer itself reads the last three."""
DEFAULTS = {
    "type": "lora",
    "alpha": 32,
    "lora_A_init_method": "xavier",
    "dropout": 0.0,
    "dropout_position": "pre",
}
DEFAULT_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass
class Peft:
    """The adapters to add when the model is built. A trainer keeps this object as its ``peft_cls``.

    Attributes:
        dim, alpha, dropout: under Megatron-Bridge's names.
        targets: names of modules of megatron-core, or of single projections.
        trains_head: whether a value head is trained, too; a hook sets this.
    """

    dim: int
    alpha: float
    kind: Sharing
    targets: tuple[str, ...]
    init: Init
    dropout: float = 0.0
    """The dropout of the input of A, in training mode."""
    trains_head: bool = False

    def __call__(self, chunks: Models) -> Models:
        """Add the adapters to bare chunks, and freeze all other parameters except a value head."""
        rules = provenance_on(chunks).mapping(tied=False).rules
        targets = [module for target in self.targets for module in _targets(rules, target)]
        options: dict[str, Any] = {"kind": self.kind, "init": self.init, "dropout": self.dropout}
        add_adapters(chunks, rank=self.dim, alpha=self.alpha, targets=targets, **options)
        for chunk in chunks:
            bare: Any = chunk
            self.trains_head = bare.bridge.head not in ("lm", "none")
            if self.trains_head and bare.post_process:
                bare.output_layer.requires_grad_(True)
        return chunks

    def disable_adapter(self, models: Models) -> AbstractContextManager[None]:
        """A block in which the models run as the base, which is the reference policy."""
        return without_adapters(models)

    def adapter_key_filter(self, key: str) -> bool:
        """Whether an entry of a chunk's state belongs to a checkpoint of adapters alone."""
        return is_adapter(key) or (self.trains_head and key.startswith("output_layer."))


def create_peft(lora: Mapping[str, Any], dtype: torch.dtype | None = None) -> Peft:
    """Read a trainer's ``lora`` config.

    Args:
        lora: the keys of verl's yaml.
        dtype: the dtype of the model, also for adapters. Another dtype in ``lora`` is refused: optimizers of
            megatron-core up to 0.19.2 do not resume fp32 parameters.

    Raises:
        ConfigError: naming all unknown keys and all unsupported values.
    """
    given = {**DEFAULTS, **lora}
    named = given.get("target_modules")
    targets = DEFAULT_TARGETS if named is None else tuple(named)
    problems = [
        f"{name} must be one of {list(MUST_BE[name])}, found {value!r}"
        for name, value in given.items()
        if name in MUST_BE and not any(_is_same(value, allowed) for allowed in MUST_BE[name])
    ]
    if not is_count(rank := given.get("rank", 0)):
        problems.append(f"rank must be an integer of at least 1, found {rank!r}")
    if not is_number(alpha := given["alpha"]):
        problems.append(f"alpha must be a number, found {alpha!r}")
    if not is_dropout(dropout := given["dropout"]):
        problems.append(f"dropout must be a number from 0 to below 1, found {dropout!r}")
    elif dropout and given["dropout_position"] != "pre":
        problems.append(f"dropout_position must be 'pre' with a dropout of {dropout}, as the input of A is dropped")
    if unknown := sorted(given.keys() - KEYS):
        problems.append(f"lora has no keys {unknown}")
    if (asked := given.get("dtype")) not in (None, dtype, *_spellings(dtype)):
        problems.append(f"dtype must be null or the model's {dtype}, found {asked!r}")
    if wild := [target for target in targets if "*" in target]:
        problems.append(f"target_modules must be the same in all layers, found the patterns {wild}")
    if problems:
        raise ConfigError(
            f"lora has settings that are not supported: {'; '.join(problems)}. Change these keys, or use "
            "Megatron-Bridge itself"
        )
    return Peft(rank, alpha, KINDS[given["type"]], targets, given["lora_A_init_method"], dropout)


def create_peft_hook(peft: Peft, training: bool = True) -> Hook:
    """A hook for ``Provider.register_pre_wrap_hook``, which adds the adapters. ``training`` is without effect."""
    return lambda chunks: list(peft(chunks))


def load_peft_adapter_checkpoint(
    model: Models, path: str | os.PathLike[str], peft: Peft | None = None, strict: bool = True
) -> None:
    """Copy trained adapters into bare chunks, from a PEFT folder, or a checkpoint of megatron-core.

    Args:
        model: this rank's chunks with adapters.
        path: a folder with ``adapter_config.json``, or a folder for ``load_checkpoint``.
        peft, strict: without effect. Every adapter must be there once.

    Raises:
        CheckpointError: the folder does not fit the adapters of the models.
    """
    dtype = next(held.dtype for name, held in held_tensors(model).items() if is_adapter(name))
    if (Path(path) / CONFIG).is_file():
        load_adapters(model, path, dtype=dtype)
    else:
        load_checkpoint(model, path, part="adapters", dtype=dtype)


def apply_peft_adapter_filter_to_state_dict(state: Mapping[str, Any], peft: Peft) -> dict[str, Any]:
    """The state of a checkpoint, with only the trained entries of chunks."""
    return {
        name: {key: value for key, value in entry.items() if peft.adapter_key_filter(key)} if _is_chunk(name) else entry
        for name, entry in state.items()
    }


def _targets(rules: Rules, target: str) -> Iterator[str]:
    if target not in PARTS:
        yield target
        return
    layer, part, count = PARTS[target]
    joined = [rule for rule in rules if rule.mcore.endswith(f".{layer}.weight") and not rule.mcore.startswith(TOWER)]
    others = [list(rule.hf) for rule in joined if len(rule.hf) != count]
    if others or not joined:
        raise ConfigError(
            f"{target} is one of {count} projections that {layer} joins, found {others or 'no such layer'}: name the "
            "layers of the model, or HF's own names"
        )
    yield from (rule.hf[part].removesuffix("[*]").removesuffix(".weight") for rule in joined)


def _spellings(dtype: torch.dtype | None) -> tuple[str, ...]:
    name = str(dtype).removeprefix("torch.")
    return name, name.replace("float", "fp").replace("bfp", "bf")


def _is_same(value: object, allowed: object) -> bool:
    return value == allowed and isinstance(value, str) == isinstance(allowed, str)


def _is_chunk(name: str) -> bool:
    return name.startswith("model")
