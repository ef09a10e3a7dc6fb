"""Weights as a trainer has written them."""

from pathlib import Path
from typing import Any

from safetensors.torch import load_file


def read(folder: str | Path) -> dict[str, Any]:
    return {name: tensor for path in Path(folder).glob("*.safetensors") for name, tensor in load_file(path).items()}
