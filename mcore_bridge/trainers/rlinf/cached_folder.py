"""Folders that one writer makes once, with a record of their source. A folder appears only when it is complete."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mcore_bridge.errors import CheckpointError
from mcore_bridge.foreign_files import parse, read_json
from mcore_bridge.trainers.rlinf.convertor_settings import ConvertorSettings
from mcore_bridge.weights.files.atomic_folder import commit, target_of, updating
from mcore_bridge.weights.files.folder_lock import PREFIX
from mcore_bridge.weights.files.sources import SourceFolders

FINGERPRINT = "mcore_bridge.json"
Fingerprint = dict[str, Any]


def _fingerprint(source: Path, conversion: ConvertorSettings | None) -> Fingerprint:
    """Everything that a folder depends on: the files of the source, and the settings except paths.

    Files are identified by name, size and time of change, and the config by its content.
    """
    files = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(source.glob("*.safetensors"))}
    config = hashlib.sha256((source / "config.json").read_bytes()).hexdigest()
    asked = {} if conversion is None else asdict(conversion)
    asked = {name: value for name, value in asked.items() if name not in ("load_path", "save_path")}
    values: Fingerprint = parse(json.dumps({"files": files, "config": config, "asked": asked}).encode())
    return values


@contextmanager
def made_once(
    target: str | os.PathLike[str], source: Path, conversion: ConvertorSettings | None = None
) -> Iterator[Path | None]:
    """Yield a folder to fill, which becomes ``target``; None if ``target`` was already made from ``source``.

    Other processes that need this folder wait until it is made.

    Raises:
        CheckpointError: ``target`` is ``source``, or was made from other files; or ``source`` was changed during the
            block.
    """
    folder, sources = target_of(target), SourceFolders.of(source)
    sources.require_apart(folder)
    wanted = _fingerprint(source, conversion)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f".{folder.name}.lock")):
        if folder.exists() and not all(path.name.startswith(PREFIX) for path in folder.iterdir()):
            _require(folder, wanted)
            yield None
            return
        with updating(folder) as update:
            yield update.new
            (update.new / FINGERPRINT).write_text(json.dumps(wanted, indent=1) + "\n")
            commit(update, sources)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait until no other process holds the lock. Links are not followed, since others may write to the folder."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise CheckpointError(f"cannot lock {path}: {error.strerror}; remove it if you do not need the file") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _require(target: Path, wanted: Fingerprint) -> None:
    path = target / FINGERPRINT
    try:
        recorded = read_json(path)
        if not isinstance(recorded, dict):
            raise ValueError("no object")
    except (CheckpointError, ValueError) as error:
        raise CheckpointError(
            f"{target} must be empty or made by this convertor, and has no {FINGERPRINT} ({error}); remove it"
        ) from None
    stale = [name for name in wanted if recorded.get(name) != wanted[name]]
    if stale:
        changes = "; ".join(f"{name} was {recorded.get(name)}, and is {wanted[name]}" for name in stale)
        raise CheckpointError(
            f"{target} was made from something else: {changes}. Remove it, or convert into another folder"
        )
