"""Folders of megatron-core's checkpoints (``torch_dist``): where they are, and which tensors they hold.

A tensor of such a folder is that of the whole model: as one rank without parallelism would hold it. Layers may be
entries of one tensor, by a leading axis, and experts mostly are. Nothing here communicates.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_bridge.errors import CheckpointError
from mcore_bridge.rules.names import plain_key

if TYPE_CHECKING:
    import os

    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

CONFIG = "metadata.json"
"""megatron-core writes it last: where it is missing, a save did not come to its end."""
TRACKER = "latest_checkpointed_iteration.txt"
VERLS = ("dist_ckpt", "model/dist_ckpt")
"""Where verl has its checkpoint in the folder of a role: before 0.9.0, and since."""
CONTENT: Mapping[str, Any] = {
    "non_homogeneous_layers": True,
    "singleton_local_shards": False,
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}
"""How we write, as megatron-core notes it: a key for each layer, an optimizer's state so that any mesh reads it."""
VERSION: Mapping[str, Any] = {"checkpoint_version": 3.0}
"""What Megatron-LM asks for: without it, queries, keys and values are taken for those of its first releases."""
HEADS = (".metadata", CONFIG)
"""Without these nobody takes a folder for a checkpoint."""
_DIST_FILES = ("__[0-9]*_[0-9]*.distcp", "common.pt", *HEADS)
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_ITERATION = re.compile(r"release|iter_(\d{7,})")
_SINGLE_EXPERT = re.compile(r"\.experts\.experts\.\d+\.")
_MODEL = ("embedding.", "decoder.", "output_layer.", "mtp.")


@dataclass(frozen=True)
class TorchDistFolder:
    """One checkpoint of megatron-core, which may hold the state of an optimizer and more beside the model."""

    path: Path
    metadata: Metadata

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> TorchDistFolder:
        """Find a checkpoint, as ``find_checkpoint`` does.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        path = find_checkpoint(Path(folder))
        try:
            return cls(path, FileSystemReader(path).read_metadata())
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError) as error:
            raise CheckpointError(f"{path} has no readable .metadata ({error!r}); copy the folder again") from None

    @cached_property
    def tensors(self) -> Mapping[str, TensorStorageMetadata]:
        """The tensors of the model, by their keys in the folder."""
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        found = self.metadata.state_dict_metadata.items()
        return {key: each for key, each in found if isinstance(each, TensorStorageMetadata) and key.startswith(_MODEL)}

    @property
    def files(self) -> list[str]:
        """The names of those that hold what the folder says that it has."""
        return sorted({each.relative_path for each in self.metadata.storage_data.values()})

    @property
    def is_stacked(self) -> bool:
        """Whether layers lie in one tensor."""
        layers = (key.split(".")[2] for key in self.tensors if key.startswith("decoder.layers."))
        return not all(map(str.isdigit, layers))

    @property
    def spelling(self) -> Mapping[str, Any]:
        """How the folder was written, as far as its keys tell: with a key for each expert?"""
        return {**CONTENT, "singleton_local_shards": any(map(_SINGLE_EXPERT.search, self.tensors))}

    def spelled(self) -> Mapping[str, str]:
        """The keys of the model's tensors by ``plain_key``, by which they are found however they are spelled.

        Raises:
            CheckpointError: two are spellings of one.
        """
        return by_plain_key(self.tensors)


def find_checkpoint(folder: Path) -> Path:
    """The folder with ``metadata.json``: this one, one of ``VERLS`` in it, or its latest iteration (Megatron-LM).

    Raises:
        CheckpointError: there is none.
    """
    latest = latest_in(folder)
    for path in (folder, *(folder / each for each in VERLS), *latest):
        if (path / CONFIG).is_file():
            return path
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder: expected one of HF, or a checkpoint of megatron-core")
    if any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} is a folder of HF, not of megatron-core: load it by load_hf_weights")
    if (folder / "config.json").is_file() and not latest:
        raise CheckpointError(
            f"{folder} has a config.json, but neither *.safetensors nor {CONFIG}: expected a folder of HF, or a "
            "checkpoint of megatron-core; save a HF model in other files again, by save_pretrained of transformers"
        )
    raise CheckpointError(
        f"{folder} is no checkpoint of megatron-core's dist_checkpointing: expected {CONFIG} in it, in its "
        f"{' or '.join(VERLS)}, or in the iteration that {TRACKER} names "
        f"({latest[0].name if latest else 'no such file'}). A save that did not come to its end lacks it too: use an "
        "earlier iteration"
    )


def dist_files(folder: Path) -> list[str]:
    """The names of the files of a checkpoint that are there, without the HF config and what lies beside it."""
    return sorted(path.name for pattern in _DIST_FILES for path in folder.glob(pattern))


def latest_in(folder: Path) -> list[Path]:
    """The folder of the iteration that a tracker file (Megatron-LM) names, if there is one."""
    tracker = folder / TRACKER
    return [folder / _iteration(tracker.read_text().strip())] if tracker.is_file() else []


def track(folder: Path) -> None:
    """Enter a folder that is called as Megatron-LM calls its iterations in the tracker file beside it, as the latest.

    Megatron-LM finds no checkpoint without one, and trains from random weights.

    Raises:
        CheckpointError: the file cannot be written.
    """
    match = _ITERATION.fullmatch(folder.name)
    if match is None:
        return
    tracker, new = folder.with_name(TRACKER), folder.with_name(f".{TRACKER}.new")
    try:
        new.write_text(str(int(match[1])) if match[1] else folder.name)
        new.replace(tracker)
    except OSError as error:
        raise CheckpointError(
            f"{folder} is complete, but {tracker}, by which Megatron-LM finds it, cannot be written: {error}; write it"
        ) from None


def by_plain_key(keys: Iterable[str]) -> Mapping[str, str]:
    """``keys`` by how ``plain_key`` spells them."""
    found: dict[str, str] = {}
    for key in keys:
        if (other := found.setdefault(plain_key(key), key)) != key:
            raise CheckpointError(f"{other} and {key} are the same parameter; the checkpoint must have one of them")
    return found


def _iteration(number: str) -> str:
    return f"iter_{int(number):07d}" if number.isdigit() else number  # else it is "release"


def in_layer_stack(key: str) -> tuple[str, int | None]:
    """The key of the tensor for all layers in place of that for one, and the number of that one; as it is without."""
    match = _LAYER.match(key)
    return (_LAYER.sub("decoder.layers.", key), int(match[1])) if match else (key, None)
