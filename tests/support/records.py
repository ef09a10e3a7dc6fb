"""Records of tests on GPUs for ``docs/reference/support.md``: lines of JSON in the file of ``--record``."""

import datetime
import importlib.metadata
import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tests.support.gpus import ranks_per_gpu

PACKAGES = ("torch", "megatron-core", "transformer-engine", "transformers")


def append(path: str | None, check: str, world_size: int, found: Iterable[tuple[tuple[str, str], bool]]) -> None:
    """Record for each mesh and family whether all results in ``found`` passed. Without a path, record nothing.

    A mesh is named with its replicas, such as "TP2 SP DP2".
    """
    if path is None:
        return
    passed: dict[tuple[str, str], bool] = {}
    for key, is_right in found:
        passed[key] = passed.get(key, True) and is_right
    known: dict[str, Any] = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "gpus": -(-world_size // ranks_per_gpu()),
        "device": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES if _is_installed(name)},
    }
    if (shared := min(world_size, ranks_per_gpu())) > 1:
        known["ranks_per_gpu"] = shared
    with Path(path).open("a", encoding="utf-8") as file:
        for (mesh, family), is_right in passed.items():
            file.write(json.dumps({"check": check, "mesh": mesh, "family": family, "passed": is_right, **known}) + "\n")


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
