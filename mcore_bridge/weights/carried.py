"""Carried tensors: those of a composite beside its text model, if its tower is not built. A save copies them.

They are copied byte by byte from the folder of the model. Encoded ones are decoded, since saved files are plain.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from mcore_bridge.weights.files.decoded import opened_folder
from mcore_bridge.weights.files.hf_folder import Checkpoint
from mcore_bridge.weights.files.sources import Sources
from mcore_bridge.weights.manifest import ManifestEntry

if TYPE_CHECKING:
    from mcore_bridge.weights.provenance import Provenance

logger = logging.getLogger("mcore_bridge")


@dataclass(frozen=True, slots=True)
class Carried:
    """The carried tensors of a folder, in the order of its files. A text model has none.

    ``sources`` has the folder, as it was when its tensors were listed.
    """

    specs: tuple[ManifestEntry, ...] = ()
    folder: str | None = None
    sources: Sources = field(default_factory=Sources)

    def pairs(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """``(name, tensor)`` for each of ``names``, decoded if needed; see ``Checkpoint.pairs``."""
        if self.folder is not None:
            for name, tensor in opened_folder(Checkpoint(self.folder)).pairs(names):
                yield name, tensor if isinstance(tensor, Tensor) else tensor.to(tensor.dtype)


def carried_of(provenance: Provenance) -> Carried:
    """The tensors that a save of this model must copy: none if the tower is built.

    Without a folder nothing can be copied. The save then holds the text model alone, and a warning is logged.
    """
    if provenance.whole is None or provenance.tower:
        return Carried()
    if provenance.folder is None:
        logger.warning(
            "the other parts of this %s are not saved, since their folder is not known. Build the model from the "
            "folder of the checkpoint, or load the weights from it",
            provenance.config.model_type,
        )
        return Carried()
    sources = Sources.of(provenance.folder)
    checkpoint = opened_folder(Checkpoint(provenance.folder))
    mapping = provenance.mapping(tied=bool(provenance.hf.tie_word_embeddings))
    specs = (
        ManifestEntry(name, tuple(tensor.shape), tensor.dtype)
        for name, tensor in checkpoint.items()
        if mapping.is_carried(name)
    )
    return Carried(tuple(specs), provenance.folder, sources)
