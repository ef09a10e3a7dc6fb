"""A folder that is made once, by one writer, and that says of what: it appears whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mcore_bridge.errors import CheckpointError
from mcore_bridge.trainers.rlinf.conversion import Conversion
from mcore_bridge.weights.files.atomic_folder import commit, target_of, updating
from mcore_bridge.weights.files.folder_lock import PREFIX

FINGERPRINT = "mcore_bridge.json"
Fingerprint = dict[str, Any]


def fingerprint(source: Path, conversion: Conversion | None = None) -> Fingerprint:
    """All that a folder depends on: the files of the source, and what was asked for besides paths.

    Files are told by name, size and time of change, and the config by what it says.
    """
    files = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(source.glob("*.safetensors"))}
    config = hashlib.sha256((source / "config.json").read_bytes()).hexdigest()
    asked = {} if conversion is None else asdict(conversion)
    asked = {name: value for name, value in asked.items() if name not in ("load_path", "save_path")}
    found: Fingerprint = json.loads(json.dumps({"files": files, "config": config, "asked": asked}))
    return found


@contextmanager
def made_once(target: Path, wanted: Fingerprint) -> Iterator[Path | None]:
    """Yield a folder to fill, which becomes ``target``; None where that has been made so already.

    Other processes that want the same wait for this one, and then find it made.

    Raises:
        CheckpointError: ``target`` is there, and of something else.
    """
    target = target_of(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists() and not all(path.name.startswith(PREFIX) for path in target.iterdir()):
            _require(target, wanted)
            yield None
            return
        with updating(target) as update:
            yield update.new
            (update.new / FINGERPRINT).write_text(json.dumps(wanted, indent=1) + "\n")
            commit(update)


def _require(target: Path, wanted: Fingerprint) -> None:
    path = target / FINGERPRINT
    if not path.is_file():
        raise CheckpointError(f"{target} must be empty or made by this convertor, and has no {FINGERPRINT}; remove it")
    found = json.loads(path.read_text())
    stale = [name for name in wanted if found.get(name) != wanted[name]]
    if stale:
        said = "; ".join(f"{name} was {found.get(name)}, and is {wanted[name]}" for name in stale)
        raise CheckpointError(f"{target} was made of something else: {said}. Remove it, or convert into another folder")
