"""Which layers of HF the layers of a chunk are. Those of a ``HybridModel`` are halves of them.

If we built it, each half has the number of its layer. Another trainer's ``HybridModel`` counts halves. Only the HF
config says which of these are one layer, since models with layers of one half have equal patterns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from mcore_bridge.architecture import architecture_of
from mcore_bridge.config.layer_kinds import inner_letters, letters_of
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.config.transformer import to_transformer_config
from mcore_bridge.errors import MappingError
from mcore_bridge.rules.hybrid_keys import HalfKeys

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

    from mcore_bridge.weights.provenance import Provenance


def is_hybrid(chunk: GPTModel) -> bool:
    """Whether a chunk is a ``HybridModel``."""
    return hasattr(chunk, "hybrid_layer_pattern")


def learn_layers(chunks: Iterable[GPTModel], provenance: Provenance) -> None:
    """Have each ``HybridModel`` that another trainer built know the config of its whole layers.

    Raises:
        MappingError: it has other layers than the HF config says.
    """
    for chunk in filter(_counts_halves, chunks):
        own = chunk.config
        dims = ParallelDims(
            tp=own.tensor_model_parallel_size, etp=own.expert_tensor_parallel_size, sp=own.sequence_parallel
        )
        table = architecture_of(provenance.hf).fields
        chunk.bridge_whole = to_transformer_config(provenance.hf, table, dims=dims, dtype=torch.float32)
        expected = "".join(letters_of(chunk.bridge_whole))
        built, *mtp = chunk.hybrid_layer_pattern.replace("|", "").split("/")
        if built != expected:
            raise MappingError(
                f"the HybridModel must have the layers {expected!r}, as the HF config says, found {built!r}: pass the "
                "hf= that it was built for"
            )
        within = inner_letters(chunk.bridge_whole)
        if {*mtp} - {within}:
            raise MappingError(
                f"the HybridModel must have MTP layers of {within!r}, as the HF config says, found {'/'.join(mtp)!r}: "
                "pass the config that it was built for"
            )


def whole_config(chunk: GPTModel) -> TransformerConfig:
    """The config of a chunk whose layers are those of HF.

    Raises:
        MappingError: another trainer built the chunk, a ``HybridModel``, and nobody has passed its HF config.
    """
    if not _counts_halves(chunk):
        return chunk.config
    known: TransformerConfig | None = getattr(chunk, "bridge_whole", None)
    if known is None:
        raise MappingError(
            "this HybridModel was not made by build_model, and its layers are halves of HF's layers: call "
            "adopt(models, hf) with its HF config or folder first"
        )
    return known


def layers_of_chunk(chunk: GPTModel) -> tuple[int, ...]:
    """For each layer of a chunk, the number (from 0) of its layer in HF.

    Raises:
        MappingError: as ``whole_config``.
    """
    numbers = tuple(layer.layer_number - 1 for layer in chunk.decoder.layers)
    return tuple(map(_halves(chunk).layers.__getitem__, numbers)) if _counts_halves(chunk) else numbers


def whole_layers(chunks: Iterable[GPTModel]) -> frozenset[int]:
    """The layers of HF of which these chunks have all halves: pipelines of other trainers may cut between them."""
    chunks = tuple(chunks)
    held = Counter(layer for chunk in chunks for layer in layers_of_chunk(chunk))
    if not _counts_halves(chunks[0]):
        return frozenset(held)
    letters = _halves(chunks[0]).letters
    return frozenset(layer for layer, count in held.items() if count == len(letters[layer]))


def _counts_halves(chunk: GPTModel) -> bool:
    return is_hybrid(chunk) and not isinstance(getattr(chunk.decoder, "keys", None), HalfKeys)


def _halves(chunk: GPTModel) -> HalfKeys:
    return HalfKeys(letters_of(whole_config(chunk)))
