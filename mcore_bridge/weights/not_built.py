"""Tensors of parts of a checkpoint that are not built. A save copies them.

Such parts are the tower of a composite, and layers for multi-token prediction (MTP). Their bytes are copied from the
folder of the model. Encoded tensors are decoded, unless the save writes the format of a folder.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from torch import Tensor

from mcore_bridge.architecture import read_hf, text_config
from mcore_bridge.errors import CheckpointError, ConfigError
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.files.hf_folder import Checkpoint, names_in
from mcore_bridge.weights.files.sources import SourceFolders
from mcore_bridge.weights.source.source import Source, open_folder
from mcore_bridge.weights.source.tied_tensors import are_equal
from mcore_bridge.weights.source.weight_format import PLAIN, WeightFormat

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from mcore_bridge.rules.mapping import WeightMapping
    from mcore_bridge.weights.provenance import Provenance

Mtp = Literal["copied", "dropped"]
"""The fate of MTP layers that are not built."""
_SIZES = (
    *("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "intermediate_size"),
    *("moe_intermediate_size", "n_routed_experts", "num_experts"),
)
"""Fields of a text config that MTP layers must share with the model."""
logger = logging.getLogger("mcore_bridge")


@dataclass(frozen=True, slots=True)
class NotBuilt:
    """The tensors of a folder that are not built, in the order of its files.

    Attributes:
        mtp: the names of such tensors in MTP layers.
        sources: the state of the folder when its tensors were listed.
        is_raw: whether encoded tensors are copied as the folder stores them.
        repeated: by the name of the embedding or the head, the names in MTP layers under which the folder has it once
            more. A save writes the trained tensor there, as MTP layers of megatron-core share it.
    """

    specs: tuple[TensorSpec, ...] = ()
    folder: str | None = None
    mtp: tuple[str, ...] = ()
    sources: SourceFolders = field(default_factory=SourceFolders)
    is_raw: bool = False
    repeated: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def repeats(self, specs: Iterable[TensorSpec]) -> Iterator[TensorSpec]:
        """The specs of all repeated tensors, given the specs of the tensors that are built."""
        for spec in specs:
            yield from (TensorSpec.of(name, spec) for name in self.repeated.get(spec.name, ()))

    def with_repeats(self, pairs: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The pairs of an export, and behind each of them the same tensor under the names that repeat it."""
        with closing(pairs):  # type: ignore[type-var]  # a generator, as it promises
            for name, tensor in pairs:
                yield name, tensor
                yield from ((other, tensor) for other in self.repeated.get(name, ()))

    def pairs(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """``(name, tensor)`` for each of ``names``, decoded if needed; see ``Source.pairs``."""
        if self.folder is not None:
            source = Source(Checkpoint(self.folder)) if self.is_raw else open_folder(self.folder)
            for name, tensor in source.pairs(names):
                yield name, tensor.to(tensor.dtype)

    @property
    def note(self) -> str:
        """A message for users about copied MTP layers; empty if there are none."""
        if not self.mtp:
            return ""
        return (
            f"{len(self.mtp)} tensors of MTP layers are copied from {self.folder}, such as {self.mtp[0]}: they are not "
            "built, so training does not change them. An engine that drafts with them may accept fewer tokens. "
            "Log-probabilities do not depend on them. mtp='dropped' (convert: --drop-mtp) leaves them out"
        )


def not_built_of(
    provenance: Provenance, mapping: WeightMapping, *, mtp: Mtp = "copied", form: WeightFormat = PLAIN
) -> NotBuilt:
    """The tensors that a save of this model in a format must copy.

    Without a folder nothing can be copied. For a composite, the save then holds the text model alone, and a warning is
    logged. MTP layers are also left out if the model in the folder has another size or depth.

    Raises:
        CheckpointError: the folder is gone, or the folder of a composite has no weights.
        ConfigError: ``mtp`` is neither "copied" nor "dropped".
    """
    if mtp not in get_args(Mtp):
        raise ConfigError(f"mtp must be {' or '.join(map(repr, get_args(Mtp)))}, found {mtp!r}: pass one of them")
    _require_folder(provenance.folder)
    folder = form.folder or provenance.folder
    names = names_in(folder) if folder else ()
    _require_other_parts(provenance, names)
    if folder is None or not any(map(mapping.is_not_built, names)):
        return NotBuilt(sources=SourceFolders.of(form.folder) if form.folder else SourceFolders())
    sources = SourceFolders.of(folder)
    left_out = mapping.is_unbuilt_mtp if mtp == "dropped" or _differs(provenance) else lambda name: False
    specs: list[TensorSpec] = []
    in_mtp: list[str] = []
    repeated: dict[str, tuple[str, ...]] = {}
    source = form.source or open_folder(folder)
    for name in source:
        if mapping.is_not_built(name) and not left_out(name):
            own = mapping.repeated_by(name)
            if own is not None and _repeats(source, name, own, form):
                repeated[own] = (*repeated.get(own, ()), name)
                continue
            specs += source.raw_specs(name) if form.source else (TensorSpec.of(name, source[name]),)
            in_mtp += [name] if mapping.is_unbuilt_mtp(name) else []
    return NotBuilt(tuple(specs), folder, tuple(in_mtp), sources, form.source is not None, repeated)


def _repeats(source: Source, name: str, own: str, form: WeightFormat) -> bool:
    """Whether a tensor of a folder has the dtype and the values of a plain one, so a save writes that one twice."""
    if own not in source or own in form.files or source[own].dtype != source[name].dtype:
        return False
    return are_equal(source, own, name)


def _require_folder(folder: str | None) -> None:
    if folder is not None and not os.path.isdir(folder):
        raise CheckpointError(
            f"the folder that the model came from must be there, and {folder} is not: a save copies its tokenizer, and "
            "parts that are not built. Put it back, or pass another folder of this model as hf="
        )


def _require_other_parts(provenance: Provenance, names: Collection[str]) -> None:
    if not provenance.has_other_parts:
        return
    kind = provenance.config.model_type
    if provenance.folder is None:
        logger.warning(
            "the other parts of this %s are not saved, since their folder is not known. Build the model from the "
            "folder of the checkpoint, or load the weights from it",
            kind,
        )
    elif not names:
        raise CheckpointError(
            f"{provenance.folder} has no *.safetensors, from which the other parts of this {kind} would be copied: "
            "pass the HF folder that it was made from, with --hf (convert) or hf= (save_hf_checkpoint)"
        )


def _differs(provenance: Provenance) -> bool:
    """Whether the model in the folder has other sizes than this one, for example if an override cuts layers."""
    assert provenance.folder is not None
    there = text_config(read_hf(provenance.folder))
    return any(_size(there, name) != _size(provenance.hf, name) for name in _SIZES)


def _size(hf: PretrainedConfig, name: str) -> object:
    """The size of the model. transformers refuses to read an attribute of it that layers have of their own."""
    return vars(hf).get(hf.attribute_map.get(name, name))
