"""Files beside the weights in an HF folder: the config, the tokenizer, and code."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from mcore_bridge.config.hf import read_fields, write_fields
from mcore_bridge.config.quantization import DESCRIPTION
from mcore_bridge.errors import CheckpointError
from mcore_bridge.rules.mapping import matches

_TOKENIZER = (
    *("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "*.model", "*.tiktoken"),
    *("chat_template*", "*.jinja"),
)
_COMPANIONS = ("generation_config.json", "*processor_config.json", "*.py", "spk_dict.pt")
"""Other files to copy. Python files are the code of the model, the tokenizer and the processor, with their imports.
``spk_dict.pt`` has the voices of Qwen2.5-Omni. transformers loads no folder of this model without it.
"""
MODELOPT = "hf_quant_config.json"
NOTES = (
    MODELOPT,
    "modelopt_state.pth",
    "quantize_config.json",  # GPTQ
    "quant_config.json",  # AWQ
    "quantization_config.json",  # Neural Compressor
    "quanto_qmap.json",  # the parameters that Quanto has encoded
    "kv_cache_scales.json",
)
"""Files that describe encoded weights. A save of plain weights removes these files, and copies none."""
_OF_OTHERS = (*NOTES, "adapter_config.json", "*.index.json")
"""Files that would not describe the weights that a save writes."""
_MOST_BYTES = 2 << 30
"""More bytes than any such file has. A copy of a sparse file of terabytes would fill the disk with zeros."""


def copy_companions(
    source: str | os.PathLike[str] | None, target: Path, *others: str, kept: Collection[str] = ()
) -> None:
    """Copy the tokenizer, the model's code, and files that match ``others``.

    Args:
        source: the folder that the model came from; without one, nothing is copied.
        others: ``fnmatch`` patterns. Files that describe weights are left out.
        kept: names of files in ``target`` that stay. If a tokenizer is among them, no tokenizer is copied: an old
            ``special_tokens_map.json`` would override a new ``tokenizer_config.json``.

    Raises:
        CheckpointError: a file is too large to be a file beside weights.
    """
    tokenizer = () if any(matches(name, _TOKENIZER) for name in kept) else _TOKENIZER
    for path in Path(source).iterdir() if source is not None else ():
        wanted = matches(path.name, (*tokenizer, *_COMPANIONS, *others)) and path.name not in kept
        if wanted and path.is_file() and not matches(path.name, _OF_OTHERS):
            if (size := path.stat().st_size) > _MOST_BYTES:
                raise CheckpointError(
                    f"{path} has {size} bytes, expected at most {_MOST_BYTES} in a file beside the weights: remove it"
                )
            shutil.copy2(path, target / path.name)


def copy_note(source: Path, target: Path) -> None:
    """Copy ModelOpt's description of encoded weights, if there is one beside the config."""
    if (source / MODELOPT).is_file():
        shutil.copy2(source / MODELOPT, target / MODELOPT)


def forget_quantization(folder: Path) -> None:
    """Remove the description of quantized weights from the config of a folder, since its weights are plain now."""
    config = folder / "config.json"
    fields = read_fields(config)
    parts = [part for part in (fields, *fields.values()) if isinstance(part, dict) and part.keys() & {*DESCRIPTION}]
    for part in parts:
        for name in part.keys() & {*DESCRIPTION}:
            del part[name]
    if parts:
        write_fields(config, fields)


def describe_quantization(folder: Path, description: Mapping[str, Any]) -> None:
    """Write the fields that describe quantized weights to the config of a folder."""
    config = folder / "config.json"
    write_fields(config, {**read_fields(config), **description})


def config_folders(source: Path, iteration: Path) -> tuple[Path, ...]:
    """The folders that may have the HF config of a checkpoint: its own, or the folders to which verl writes it.

    Args:
        source: the folder that the caller named.
        iteration: the folder of the iteration in ``source``, or ``source`` itself.
    """
    return tuple(dict.fromkeys((iteration, source, source / "huggingface", iteration.parent / "huggingface")))


def first_with_config(folders: Iterable[Path]) -> Path | None:
    """The first of these folders with an HF config; None if none has one."""
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)
