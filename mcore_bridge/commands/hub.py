"""Finds what a command reads: a folder, or a repository in the local hub cache. ``--download`` fetches repositories."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from mcore_bridge.config.hf import find_folder
from mcore_bridge.errors import CheckpointError, ConfigError
from mcore_bridge.foreign_files import parse, read_json
from mcore_bridge.weights.files.hf_folder import shard_names


class Contents(NamedTuple):
    """The files that a command reads of a repository.

    Attributes:
        head: the file that every such repository has.
        patterns: the files to download.
        needs_weights: whether the command cannot work without weights.
    """

    head: str
    patterns: tuple[str, ...]
    needs_weights: bool


_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken")
_OTHERS = ("*/*", "consolidated*")
"""Further copies of the weights, in formats that are not read. Some are in subfolders."""
MODEL = Contents("config.json", _FILES, needs_weights=True)
DESCRIPTION = MODEL._replace(needs_weights=False)
"""Config and tokenizer. Parts that no model has, such as MTP layers, are copied from here if there are weights."""
CONFIG = Contents("config.json", ("config.json", "hf_quant_config.json"), needs_weights=False)
ADAPTER = Contents("adapter_config.json", ("adapter_*",), needs_weights=True)


def locate(name: Path, contents: Contents, *, download: bool) -> Path:
    """The path of an argument of a command: itself if it exists, or else its snapshot in the local hub cache.

    Args:
        name: a path, or the name of a repository.
        contents: the files that the command reads of it.
        download: fetch a repository first, so that the snapshot is complete and the newest.

    Raises:
        ConfigError: there is neither, or the download fails.
        CheckpointError: the cache has the config alone.
    """
    if os.path.exists(name := name.expanduser()):
        return name
    if not _is_repository(str(name)):
        return find_folder(name, fetch="")
    if download:
        return _downloaded(str(name), contents)
    folder = find_folder(name, head=contents.head, fetch="pass --download")
    if contents.needs_weights and not shard_names(folder):
        raise CheckpointError(f"the local hub cache has the config of {name}, and no *.safetensors: pass --download")
    return folder


def quantize_of(text: str | None, *, download: bool) -> Any:
    """The format that the option names, as ``quantize`` of the library.

    Args:
        text: "as_published", a folder or its name on the hub, JSON, or the path of a file with JSON. An object with a
            ``quantization_config``, such as a config.json, stands for this.
        download: as for ``locate``.

    Raises:
        ConfigError: there is no such folder, or the JSON is no object.
    """
    from mcore_bridge.weights.source.weight_format import AS_PUBLISHED

    if text is None or text == AS_PUBLISHED:
        return text
    if text.lstrip().startswith("{"):
        try:
            fields = parse(text.encode())
        except ValueError as error:
            raise ConfigError(
                f"--quantize must be JSON if it begins with a brace, found {text!r:.200}: {error}"
            ) from None
    elif text.endswith(".json"):
        fields = read_json(Path(text))
    else:
        return locate(Path(text), MODEL, download=download)
    if not isinstance(fields, dict):
        raise ConfigError(f"--quantize must be an object of JSON, found {type(fields).__name__} in {text}")
    return fields.get("quantization_config", fields)


def _is_repository(name: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _downloaded(name: str, contents: Contents) -> Path:
    import huggingface_hub
    from huggingface_hub import constants  # only an import finds this submodule in all releases

    if constants.HF_HUB_OFFLINE:
        raise ConfigError("--download needs the network, but HF_HUB_OFFLINE is set: unset it, or leave --download out")
    try:
        huggingface_hub.HfApi().repo_info(name)  # without a network, the next call would return an incomplete snapshot
        return Path(
            huggingface_hub.snapshot_download(name, allow_patterns=[*contents.patterns], ignore_patterns=[*_OTHERS])
        )
    except Exception as error:  # the hub's client passes on errors of its network library
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"cannot download {name} from the hub: {reason}; check the name, the network, and HF_TOKEN if the "
            "repository is private or gated"
        ) from error
