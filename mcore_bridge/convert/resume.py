"""Resumes an interrupted conversion: it keeps a file if this conversion would write a file with equal bytes."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from mcore_bridge import __version__
from mcore_bridge.convert.conversion import Conversion
from mcore_bridge.errors import CheckpointError
from mcore_bridge.foreign_files import read_bounded
from mcore_bridge.installed import megatron_release
from mcore_bridge.weights.files.sources import SourceFolders

_PLAN = "plan.json"


def resume(conversion: Conversion, sources: SourceFolders) -> frozenset[int]:
    """The numbers of files that an earlier run of this conversion wrote. Files of other conversions are removed."""
    plan = conversion.staging.with_name(_PLAN)
    own = json.dumps(_identity(conversion, sources)).encode()
    if not _holds(plan, own):
        for path in conversion.staging.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        plan.write_bytes(own)
    there = {str(path.relative_to(conversion.staging)) for path in conversion.staging.rglob("*")}
    return frozenset(number for number, name in enumerate(conversion.names) if name in there)


def _holds(path: Path, data: bytes) -> bool:
    """Whether a file has exactly these bytes."""
    try:
        return read_bounded(path, len(data)) == data
    except CheckpointError:
        return False


def _identity(conversion: Conversion, sources: SourceFolders) -> object:
    """A value that is equal for conversions that write equal files.

    It is made of the state of the sources before the plan was made, the plan, the config, and releases.
    """
    plan = hashlib.sha256()
    for part in conversion.contents:
        plan.update(repr(part).encode())
    return [
        conversion.kind,
        sources.as_json(),
        list(map(list, conversion.units)),
        plan.hexdigest(),
        conversion.options,
        [__version__, megatron_release()],
    ]
