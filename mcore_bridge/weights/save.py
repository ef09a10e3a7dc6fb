"""mcore to a HF folder: all ranks write files side by side, and the folder changes in one step.

Everything is written to a staging folder beside the target, which then takes its place. Whoever dies, whenever, the
target is the old folder or the new one.
"""

from __future__ import annotations

import copy
import ctypes
import glob
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file
from torch import Tensor

from mcore_bridge.errors import CheckpointError
from mcore_bridge.weights.bound import Models, noted
from mcore_bridge.weights.checkpoint import INDEX
from mcore_bridge.weights.dtypes import Dtypes, dtype_name
from mcore_bridge.weights.export import iter_hf_weights
from mcore_bridge.weights.manifest import Manifest, TensorSpec, manifest
from mcore_bridge.weights.provenance import HF, Dialect, Provenance
from mcore_bridge.weights.transport import Group

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MAX_SHARD_BYTES = 5 << 30
MIN_SHARD_BYTES = 64 << 20

_COMPANIONS = (
    *("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "*.model", "*.tiktoken"),
    *("generation_config.json", "chat_template*", "*.jinja"),
)
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    tensors: tuple[TensorSpec, ...]


def save_hf_checkpoint(
    models: Models,
    folder: str | os.PathLike[str],
    *,
    hf: HF | None = None,
    head: str = "lm",
    dtype: Dtypes = None,
    dialect: Dialect | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Manifest:
    """Write sharded safetensors, index, config, and the tokenizer files of the folder that the model came from.

    Called by all ranks of the job together; ``folder`` is on a file system that they share. A folder that is there
    keeps its other files and is replaced in one step. On file systems that cannot exchange two folders (some network
    ones), two renames do it, and a crash just between them leaves the old folder as ``.NAME.old``.

    Args:
        dtype: cast tensors to this; by default each is written in its own.
        dialect: of the experts, as for ``iter_hf_weights``.
        max_shard_bytes: size of a file at most, unless one tensor is larger.

    Raises:
        CheckpointError: on every rank, when any of them cannot write. The target is then as it was.
    """
    target = Path(os.path.abspath(folder))
    provenance = noted(models, hf, head)
    world = Group(None)
    staging = target.parent / f".{target.name}.{world.exchange(uuid.uuid4().hex[:8])[0]}.partial"
    error = ""
    specs = Manifest(())
    try:
        staging.mkdir(parents=True, exist_ok=True)
        specs = manifest(models, hf=hf, head=head, dtype=dtype, dialect=dialect)
        files = _files(specs, world.size, max_shard_bytes)
        mine = [file for index, file in enumerate(files) if index % world.size == world.rank]
        _write_files(iter_hf_weights(models, hf=hf, head=head, dtype=dtype, dialect=dialect), mine, staging)
        if world.rank == 0:
            _write_rest(files, specs, provenance, staging)
            _clear_stale(target, staging)
    except Exception as problem:  # whatever it is, the others must hear of it
        error = f"{type(problem).__name__}: {problem}"
    _raise_on_all(world, error, target, staging)
    try:
        if world.rank == 0:
            _replace(target, staging)
    except OSError as problem:
        error = f"{type(problem).__name__}: {problem}"
    _raise_on_all(world, error, target, staging)
    return specs


def _raise_on_all(world: Group, error: str, target: Path, staging: Path) -> None:
    failures = {rank: message for rank, message in enumerate(world.exchange(error)) if message}
    if failures:
        if world.rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise CheckpointError(f"{target} was not written, and is as it was: {failures} (by rank)")


def _files(specs: Manifest, num_writers: int, max_shard_bytes: int) -> list[_File]:
    """Files of even size in the order of the manifest, at least one for each writer while they are not tiny."""
    size = min(max_shard_bytes, max(specs.num_bytes // num_writers + 1, MIN_SHARD_BYTES))
    shards: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if shards[-1] and filled + spec.num_bytes > size:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.num_bytes
    return [_File(f"model-{i:05}-of-{len(shards):05}.safetensors", tuple(s)) for i, s in enumerate(shards, 1)]


def _write_files(pairs: Iterator[tuple[str, Tensor]], files: Sequence[_File], staging: Path) -> None:
    """Write each file as soon as its last tensor has come; the other tensors pass by."""
    file_of = {spec.name: file for file in files for spec in file.tensors}
    pending: dict[str, dict[str, Tensor]] = {file.name: {} for file in files}
    for name, tensor in pairs:
        file = file_of.get(name)
        if file is None:
            continue
        pending[file.name][name] = tensor.cpu()
        if len(pending[file.name]) == len(file.tensors):
            save_file(pending.pop(file.name), staging / file.name, metadata={"format": "pt"})


def _write_rest(files: Sequence[_File], specs: Manifest, provenance: Provenance, staging: Path) -> None:
    index = {
        "metadata": {"total_size": specs.num_bytes},
        "weight_map": {spec.name: file.name for file in files for spec in file.tensors},
    }
    (staging / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    if provenance.folder is not None:
        for path in Path(provenance.folder).iterdir():
            if path.is_file() and any(fnmatchcase(path.name, pattern) for pattern in _COMPANIONS):
                shutil.copy2(path, staging / path.name)
    _config_of(specs, provenance).save_pretrained(staging)


def _clear_stale(target: Path, staging: Path) -> None:
    """Remove what saves that died left behind."""
    for path in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):
        if path != staging:
            shutil.rmtree(path)


def _config_of(specs: Manifest, provenance: Provenance) -> PretrainedConfig:
    """The HF config of what is written: its dtype, and with a head other than the LM's the class that has it."""
    hf = copy.deepcopy(provenance.hf)
    written = max(specs, key=lambda spec: spec.num_bytes).dtype
    setattr(hf, "dtype" if hasattr(hf, "dtype") else "torch_dtype", dtype_name(written))
    score = next((spec for spec in specs if spec.name == "score.weight"), None)
    if score is not None:
        biased = any(spec.name == "score.bias" for spec in specs)
        kind = "ForTokenClassification" if biased else "ForSequenceClassification"
        hf.architectures = [f"{(hf.architectures or ['For'])[0].split('For')[0]}{kind}"]
        hf.num_labels = score.shape[0]
    return hf


def _replace(target: Path, staging: Path) -> None:
    """Put ``staging`` in the place of ``target``, which keeps what is neither weights nor written anew."""
    if not target.exists():
        staging.rename(target)
        return
    for path in target.iterdir():
        new = staging / path.name
        if not new.exists() and not any(fnmatchcase(path.name, pattern) for pattern in _WEIGHTS):
            shutil.copytree(path, new, copy_function=_link, symlinks=True) if path.is_dir() else _link(path, new)
    if _exchange(staging, target):
        shutil.rmtree(staging)
        return
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    target.rename(old)
    staging.rename(target)
    shutil.rmtree(old)


def _link(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two paths in one step, where the system can: Linux, renameat2 with RENAME_EXCHANGE (2)."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    at_cwd = -100
    return call(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), 2) == 0
