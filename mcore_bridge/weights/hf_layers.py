"""The HF layer of each layer of a chunk. The layers of a ``HybridModel`` are halves of HF layers.

If ``build_model`` built the ``HybridModel``, each half has the number of its HF layer. In another trainer's
``HybridModel`` the numbers count halves. Then the HF config is needed: without it, a layer with two halves looks like
two layers with one half.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from mcore_bridge.architecture import architecture_of
from mcore_bridge.config.hybrid_layers import letters_of
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.config.mtp import inner_letters
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
    """Store on each ``HybridModel`` of another trainer the config of its whole layers.

    Raises:
        MappingError: it has other layers than the HF config describes.
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
                f"the HybridModel must have the layers {expected!r}, as the HF config says, found {built!r}: pass "
                "the hf= for which it was built"
            )
        within = inner_letters(chunk.bridge_whole)
        if {*mtp} - {within}:
            raise MappingError(
                f"the HybridModel must have MTP layers of {within!r}, as the HF config says, found {'/'.join(mtp)!r}: "
                "pass the config for which it was built"
            )


def whole_config(chunk: GPTModel) -> TransformerConfig:
    """The config of a chunk, counting layers as HF does, and not halves of layers.

    Raises:
        MappingError: the chunk is a ``HybridModel`` of another trainer, and ``adopt`` was not called.
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
    """The HF layers of which these chunks have all halves: pipelines of other trainers may cut between halves."""
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
