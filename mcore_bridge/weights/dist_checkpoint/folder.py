"""Folders of megatron-core's checkpoints (``torch_dist``): finds them, and lists their tensors.

A tensor of such a folder is a whole parameter, as one rank without parallelism would hold it. A leading dim may stack
layers, and usually stacks experts. Nothing here communicates.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_bridge.arguments import given_path
from mcore_bridge.config.mesh.alike import Content, digest_of
from mcore_bridge.errors import FEW, CheckpointError, describe, plural
from mcore_bridge.foreign_files import read_bounded
from mcore_bridge.rules.names import OF_DRAFTS, TOWER, plain_key
from mcore_bridge.weights.dist_checkpoint.metadata import is_tiled, read_metadata, without_code

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

CONFIG = "metadata.json"
"""The file that megatron-core writes last. If it is missing, a save did not finish."""
TRACKER = "latest_checkpointed_iteration.txt"
VERLS = ("dist_ckpt", "model/dist_ckpt")
"""The folder of verl's checkpoint inside the folder of a role: before 0.9.0, and since."""
CONTENT: Mapping[str, Any] = {
    "non_homogeneous_layers": True,
    "singleton_local_shards": False,
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}
"""Our settings in megatron-core's terms: a key for each layer, and optimizer states that any mesh can read."""
VERSION: Mapping[str, Any] = {"checkpoint_version": 3.0}
"""A field that Megatron-LM needs. Without it, queries, keys and values are read in an order of old releases."""
HEADS = (".metadata", CONFIG)
"""Files that every reader requires in a checkpoint."""
_REST = ("common.pt", *HEADS)
_DIST_FILES = ("__[0-9]*_[0-9]*.distcp", *_REST)
_LAYER = re.compile(r"^decoder\.layers\.([0-9]{1,9})\.")
_TRACKED = re.compile(rb"release|[0-9]{1,18}")
_TRACKER_BYTES = 100
_ITERATION = re.compile(r"release|iter_(\d{7,})")
_SINGLE_EXPERT = re.compile(r"\.experts\.experts\.\d+\.")
_MODEL = ("embedding.", "decoder.", "output_layer.", "mtp.", TOWER, *OF_DRAFTS)


@dataclass(frozen=True)
class TorchDistFolder:
    """One checkpoint of megatron-core. It may hold the state of an optimizer and more beside the model."""

    path: Path
    metadata: Metadata

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> TorchDistFolder:
        """Find a checkpoint by ``find_checkpoint``. No code in it is run.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        path = find_checkpoint(given_path(folder))
        opened = cls(path, read_metadata(path))
        with os.scandir(path) as entries:
            others = {entry.name for entry in entries if not entry.is_file()}
        if others := others.intersection([*_REST, *opened.files]):
            raise CheckpointError(f"{path} must have files by the names {sorted(others)[:8]}, found folders or FIFOs")
        if parts := [key for key, tensor in opened.tensors.items() if not is_tiled(tensor)]:
            raise CheckpointError(
                f"{path} has only parts of {plural(len(parts), 'tensor')}, or parts twice, such as {parts[:5]}: its "
                "save did not finish; use an earlier iteration"
            )
        return opened

    @cached_property
    def tensors(self) -> Mapping[str, TensorStorageMetadata]:
        """The tensors of the model, by their keys in the folder."""
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        return {
            key: value
            for key, value in self.metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata) and key.startswith(_MODEL)
        }

    @property
    def content(self) -> Content:
        """A value by which ranks compare checkpoints. It differs for each save, by the metadata or the objects."""
        files = (self.path / name for name in _REST)
        return Content(str(self.path), digest_of(*(file.read_bytes() for file in files if file.is_file())))

    @property
    def files(self) -> list[str]:
        """The names of the files that hold the content of the folder, according to its metadata."""
        return sorted({info.relative_path for info in self.metadata.storage_data.values()})

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Name the files that are cut, or else the errors of ranks, in place of torch's tracebacks. No code is run."""
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            with without_code():
                yield
        except CheckpointException as error:
            causes = dict.fromkeys(f"{describe(cause).partition('. ')[0]:.300}" for cause, _ in error.failures.values())
            raise CheckpointError(
                f"{self.cut_files() or '; '.join(causes)}. Copy the folder again if its files have changed, or use an "
                "earlier iteration"
            ) from None

    def cut_files(self) -> str:
        """The first files that end before the content that the metadata places in them, or "" if there are none."""
        ends: dict[str, int] = {}
        for place in self.metadata.storage_data.values():
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        files = [(self.path / name, end) for name, end in sorted(ends.items())]
        sizes = [(file, file.stat().st_size if file.is_file() else 0, end) for file, end in files]
        cut = [f"{file} must have {end} bytes, found {size}" for file, size, end in sizes if size < end]
        return "; ".join(cut[:FEW])

    @property
    def is_stacked(self) -> bool:
        """Whether all layers of the model lie in one tensor per parameter, with the layer as its first dim."""
        layers = (key.split(".")[2] for key in self.tensors if key.startswith("decoder.layers."))
        return not all(map(str.isdigit, layers))

    @property
    def is_hybrid(self) -> bool:
        """Whether a ``HybridModel`` has written the folder. A folder of adapters alone has the keys of ``GPTModel``."""
        return any(key.startswith("decoder.final_norm.") for key in self.tensors)

    @property
    def spelling(self) -> Mapping[str, Any]:
        """The settings with which the folder was written, as far as its keys show them."""
        return {**CONTENT, "singleton_local_shards": any(map(_SINGLE_EXPERT.search, self.tensors))}

    def spelled(self) -> Mapping[str, str]:
        """The keys of the model's tensors by their ``plain_key``, which does not depend on the spelling.

        Raises:
            CheckpointError: two keys are spellings of one.
        """
        return by_plain_key(self.tensors)


def find_checkpoint(folder: Path) -> Path:
    """Find the folder with ``metadata.json``: this one, one of ``VERLS`` in it, or its latest iteration (Megatron-LM).

    Raises:
        CheckpointError: there is none.
    """
    latest = latest_in(folder)
    for path in (folder, *(folder / name for name in VERLS), *latest):
        if (path / CONFIG).is_file():
            return path
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder: expected an HF folder, or a checkpoint of megatron-core")
    if any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{folder} is an HF folder, not a checkpoint of megatron-core: load it by load_hf_weights"
        )
    if (folder / "config.json").is_file() and not latest:
        raise CheckpointError(
            f"{folder} has a config.json, but neither *.safetensors nor {CONFIG}: expected a folder of HF, or a "
            "checkpoint of megatron-core. If it is an HF model in other files, save it again with save_pretrained"
        )
    raise CheckpointError(
        f"{folder} is no checkpoint of megatron-core's dist_checkpointing: expected {CONFIG} in it, in its "
        f"{' or '.join(VERLS)}, or in the iteration that {TRACKER} names "
        f"({latest[0].name if latest else 'no such file'}). A save that did not finish lacks it, too: use an earlier "
        "iteration"
    )


def dist_files(folder: Path) -> list[str]:
    """The names of a checkpoint's files in ``folder``, without the HF config and the tokenizer."""
    return sorted(path.name for pattern in _DIST_FILES for path in folder.glob(pattern))


def latest_in(folder: Path) -> list[Path]:
    """The folder of the iteration that a tracker file (Megatron-LM) names, if there is one.

    Raises:
        CheckpointError: the file names no iteration.
    """
    tracker = folder / TRACKER
    if not tracker.is_file():
        return []
    name = read_bounded(tracker, _TRACKER_BYTES).strip()
    if _TRACKED.fullmatch(name) is None:  # such as a path that leads out of the folder
        raise CheckpointError(
            f"{tracker} must hold the number of an iteration, or 'release', found {name!r}: correct it, or name the "
            "folder of an iteration"
        )
    return [folder / _iteration(name.decode())]


def track(folder: Path) -> None:
    """Write the name of ``folder`` to the tracker file beside it, if it has Megatron-LM's form for an iteration.

    Without that file Megatron-LM finds no checkpoint, and trains from random weights.

    Raises:
        CheckpointError: the file cannot be written.
    """
    match = _ITERATION.fullmatch(folder.name)
    if match is None:
        return
    tracker, new = folder.with_name(TRACKER), folder.with_name(f".{TRACKER}.new")
    try:
        new.unlink(missing_ok=True)
        with new.open("x") as file:  # a link with this name would write to another file
            file.write(str(int(match[1])) if match[1] else folder.name)
        new.replace(tracker)
    except OSError as error:
        raise CheckpointError(
            f"{folder} is complete, but {tracker}, by which Megatron-LM finds it, cannot be written: {error}; write it"
        ) from None


def by_plain_key(keys: Iterable[str]) -> Mapping[str, str]:
    """Each of ``keys`` by its ``plain_key``.

    Raises:
        CheckpointError: two keys are spellings of one.
    """
    by_key: dict[str, str] = {}
    for key in keys:
        if (other := by_key.setdefault(plain_key(key), key)) != key:
            raise CheckpointError(f"{other} and {key} are the same parameter; the checkpoint must have one of them")
    return by_key


def _iteration(number: str) -> str:
    return f"iter_{int(number):07d}" if number.isdigit() else number  # else it is "release"


def in_layer_stack(key: str) -> tuple[str, int | None]:
    """The key of the tensor that stacks all layers, and the layer's number in it; a key of no layer is unchanged."""
    match = _LAYER.match(key)
    return (_LAYER.sub("decoder.layers.", key), int(match[1])) if match else (key, None)
