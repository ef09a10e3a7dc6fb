"""The option ``--quantize``: the format of weights that a command writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mcore_bridge.errors import ConfigError
from mcore_bridge.foreign_files import parse, read_json

_NOTE = "quantization_config"


def quantize_of(text: str | None, *, download: bool) -> Any:
    """The format that the option names, as ``quantize`` of the library.

    Args:
        text: "as_published", a folder or its name on the hub, JSON, or the path of a file with JSON. An object with a
            ``quantization_config``, such as a config.json, stands for this.
        download: as for ``locate``.

    Raises:
        ConfigError: there is no such folder, or the JSON is no object.
    """
    from mcore_bridge.commands.hub import MODEL, locate
    from mcore_bridge.weights.weight_format import AS_PUBLISHED

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
    return fields.get(_NOTE, fields)
