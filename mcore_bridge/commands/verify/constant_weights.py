"""Replaces constant weights in a comparison of logits: norms of ones, biases of zeros, and tensors that are equal.

If a rule exchanges two norms whose values are all one, logits do not change. So ``verify`` changes such tensors in the
model and in its reference. The new values are random, and depend on the HF name alone. Files stay unchanged.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from mcore_bridge.commands.random_values import is_flat, varied
from mcore_bridge.config.hf import read_fields, write_fields
from mcore_bridge.rules.adapters import base_name
from mcore_bridge.rules.encoded import Encoded
from mcore_bridge.rules.mapping import WeightMapping
from mcore_bridge.weights.files.hf_folder import Checkpoint
from mcore_bridge.weights.files.positional_io import array_of
from mcore_bridge.weights.files.safetensors import SafetensorsFile
from mcore_bridge.weights.load import overwrite
from mcore_bridge.weights.model_chunks import Models
from mcore_bridge.weights.peft.peft_config import CONFIG, WEIGHTS, PeftNames
from mcore_bridge.weights.peft.peft_read import PeftConfig
from mcore_bridge.weights.source.source import Source, open_folder
from mcore_bridge.weights.transfer.collectives import Group

_Signature = tuple[str, bool, bool, tuple[object, ...]]
"""Of a tensor: its name, whether it is encoded, whether it is flat, and checksums of its parts."""


@dataclass(frozen=True, slots=True)
class Alike:
    """The tensors of a folder that are constant, or equal to another tensor.

    Attributes:
        keys: names in the folder of the tensors to change, each with the model's name. New values depend on this name.
        encoded: names of the encoded tensors among them, which stay unchanged.
    """

    keys: Mapping[str, str]
    encoded: tuple[str, ...] = ()

    def tensors(self, folder: Path) -> dict[str, Tensor]:
        """All tensors of the folder, some with changed values and the others as in its files."""
        files = Checkpoint(folder)
        return {name: varied(self.keys[name], files[name]) if name in self.keys else files[name] for name in files}

    def write(self, models: Models, folder: Path, mapping: WeightMapping) -> None:
        """Write the changed values to this rank's chunks, which already hold all other values."""
        overwrite(models, Source(self.tensors(folder)).for_model(mapping), dict.fromkeys(self.keys.values()))


def alike_in(folder: Path, mapping: WeightMapping) -> Alike:
    """Find the tensors of a folder that are constant, or equal to another. All ranks call it; each reads a part.

    Args:
        folder: the checkpoint.
        mapping: the mapping of the model whose logits are compared. Tensors that the model does not use are left out.
    """
    world, source = Group(None), open_folder(folder, mapping)
    main_names = {name: mapping.twins.get(name, name) for name in source}
    used = [name for name, main in main_names.items() if name == main and mapping.consumers(name)]
    mine = [*_signatures(source, used[world.rank :: world.size])]
    signatures = [signature for share in world.all_gather_object(mine) for signature in share]
    counts = Counter(checksum for *_, checksums in signatures for checksum in checksums)
    alike = [
        (name, is_encoded)
        for name, is_encoded, flat, checksums in signatures
        if flat or any(counts[checksum] > 1 for checksum in checksums)
    ]
    changed = {name for name, is_encoded in alike if not is_encoded}
    keys = {source.stored(name).names[0]: main for name, main in main_names.items() if main in changed}
    return Alike(keys, tuple(name for name, is_encoded in alike if is_encoded))


def _signatures(source: Source, names: Sequence[str]) -> Iterator[_Signature]:
    """Yield the signatures of some tensors. A stack of experts counts as the tensors in it."""
    for name, weight in source.pairs(names):
        is_encoded = isinstance(weight, Encoded)
        tensors = weight.parts if isinstance(weight, Encoded) else (weight,)
        parts = [entry for tensor in tensors for entry in (tensor.unbind() if tensor.dim() > 2 else [tensor])]
        if weight.is_floating_point():
            yield name, is_encoded, not is_encoded and any(map(is_flat, parts)), tuple(map(_checksum, parts))


def _checksum(tensor: Tensor) -> object:
    return tuple(tensor.shape), str(tensor.dtype), zlib.crc32(array_of(tensor.contiguous()).data)


def told_apart(adapter: Path, target: Path, *, swapped: bool) -> None:
    """Write a copy of an adapter in which no tensor is constant: if B is zero, A has no effect on logits.

    Patterns in its config are replaced by the names that they match. ``peft`` would run them without a limit of time,
    on names that were not checked here.

    Args:
        adapter: a PEFT folder that has been read without complaints.
        target: an empty folder.
        swapped: as for ``PeftNames``.
    """
    fields, file = read_fields(adapter / CONFIG), SafetensorsFile(adapter / WEIGHTS)
    tensors = {name: file.tensor(name) for name in file.entries}
    changed = {name: varied(name, tensor) if is_flat(tensor) else tensor.clone() for name, tensor in tensors.items()}
    save_file(changed, target / WEIGHTS)
    write_fields(target / CONFIG, {**fields, **_without_patterns(fields, tensors, swapped)})


def _without_patterns(fields: Mapping[str, Any], names: Mapping[str, object], swapped: bool) -> dict[str, Any]:
    config = PeftConfig.of(fields)
    naming = PeftNames(config.stacks, swapped=swapped)
    modules = sorted({base_name(naming.to_hf(name)) for name in names})
    plain: dict[str, Any] = {}
    if isinstance(config.target_modules, str) and config.target_modules.lower() != "all-linear":
        plain["target_modules"] = [module for module in modules if not naming.is_stack(module)]
    if isinstance(config.exclude_modules, str):
        plain["exclude_modules"] = None
    if config.rank_pattern or config.alpha_pattern:
        plain["rank_pattern"] = {re.escape(module): config.rank_of(module) for module in modules}
        alphas = {re.escape(module): config.scale_of(module) * config.rank_of(module) for module in modules}
        plain |= {"alpha_pattern": alphas, "use_rslora": False}
    return plain
