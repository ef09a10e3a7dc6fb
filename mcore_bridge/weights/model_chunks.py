"""The chunks of this rank, and the HF layers of their layers. In a ``HybridModel``, a layer is only half of an HF
layer.

If this library built the model, each half has the number of its HF layer. A ``HybridModel`` of another trainer numbers
its halves. The HF config then decides which halves form one layer, because the pattern of letters is ambiguous.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from mcore_bridge.architecture import architecture_of
from mcore_bridge.arguments import instance_of, require
from mcore_bridge.config.fields import to_mcore
from mcore_bridge.config.layer_kinds import inner_letters, letters_of
from mcore_bridge.config.unread_fields import without_unread
from mcore_bridge.errors import ConfigError, MappingError
from mcore_bridge.rules.adapters import Adapters, base_name
from mcore_bridge.rules.hybrid_keys import HalfKeys
from mcore_bridge.rules.names import Numbering

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from transformers import PretrainedConfig


Models = Sequence[nn.Module] | nn.Module
"""This rank's chunks, one per virtual pipeline stage, wrapped (DDP, Float16Module, ...) or not."""


_MODELS = instance_of("this rank's chunks, which build_model returns", nn.Module, Iterable, advice="pass its result")


def modules_of(models: Models) -> list[nn.Module]:
    """The chunks as they were given, with their wrappers.

    Raises:
        MappingError: ``models`` is neither a module nor a list.
    """
    require(MappingError, models=(models, _MODELS))
    return [models] if isinstance(models, nn.Module) else [*models]


def chunks_of(models: Models) -> tuple[GPTModel, ...]:
    """The ``GPTModel`` of each chunk, without wrappers.

    Raises:
        MappingError: when there are no chunks, or they are no ``GPTModel``.
    """
    chunks = tuple(map(unwrap, modules_of(models)))
    if not chunks:
        raise MappingError("no models given; expected this rank's chunks, one per virtual pipeline stage")
    return chunks


def groups_of(models: Models) -> ProcessGroupCollection:
    """The groups in which ranks agree on a call with ``models``: those of the chunks.

    A rank with wrong models has no chunks, and other ranks wait for it. So it takes the groups of ``parallel_state``,
    where ``chunks_of`` refuses its models together with its other arguments.

    Raises:
        MappingError: as ``chunks_of``, and there is no ``parallel_state`` either.
    """
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    try:
        return chunks_of(models)[0].pg_collection
    except (MappingError, AttributeError):
        if not parallel_state.model_parallel_is_initialized():
            raise
        return ProcessGroupCollection.use_mpu_process_groups()


def all_chunks_of(models: Models) -> tuple[GPTModel, ...]:
    """The ``GPTModel`` of each chunk, for callers that need all chunks of this rank in the order in which they run.

    Raises:
        MappingError: as ``chunks_of``; or a chunk is absent, comes twice, or is in the wrong place.
    """
    chunks = chunks_of(models)
    stages = [getattr(chunk, "vp_stage", None) or 0 for chunk in chunks]
    count = chunks[0].config.virtual_pipeline_model_parallel_size or 1
    if stages != [*range(count)]:
        raise MappingError(
            f"models must be the chunks of the {count} virtual stages of this rank, in their order, found chunks of "
            f"the stages {stages}: pass all that build_model has returned"
        )
    return chunks


def unwrap(model: nn.Module) -> GPTModel:
    """The ``GPTModel`` inside wrappers that keep their model as ``module`` (DDP, Float16Module, ...)."""
    bare: Any = model
    while not hasattr(bare, "decoder"):
        inner = getattr(bare, "module", None)
        if not isinstance(inner, nn.Module):
            inside = "" if bare is model else f" around {type(bare).__name__}"
            raise MappingError(
                "expected a GPTModel or HybridModel, or a wrapper with one at .module, found "
                f"{type(model).__name__}{inside}: pass what build_model has returned"
            )
        bare = inner
    return bare


def adapters_of(models: Models) -> Adapters:
    """The adapters that ``add_adapters`` has added to models.

    Raises:
        ConfigError: they have no adapters.
    """
    made: Adapters | None = getattr(chunks_of(models)[0], "bridge_adapters", None)
    if made is None:
        raise ConfigError("models must have adapters, found none: call add_adapters first")
    return made


def switch_of(made: Adapters) -> str:
    """The name of a state in megatron-core's tracker of random numbers, which switches these adapters off."""
    return f"mcore_bridge: without adapters {id(made)}"


def is_without_adapters(chunk: Any) -> bool:
    """Whether a block of ``without_adapters`` is entered for the chunk."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    made: Adapters | None = getattr(chunk, "bridge_adapters", None)
    return made is not None and switch_of(made) in get_cuda_rng_tracker().states_


def adapters_in_use(models: Models) -> str | None:
    """A description of the adapters that a forward uses, for ranks to compare; None without adapters."""
    chunk: Any = chunks_of(models)[0]
    made: Adapters | None = getattr(chunk, "bridge_adapters", None)
    if made is None:
        return None
    state = "off" if is_without_adapters(chunk) else "on"
    kind = f"{made.kind}, dropout {made.dropout}, dora {made.dora}"
    name = chunk.bridge_adapter_sets.in_use
    targets = sorted({base_name(hf) for rule in made.mapping.rules for hf in rule.hf})
    return f"{name!r}, rank {made.rank}, alpha {float(made.alpha)}, {kind}, {state}, of {', '.join(targets)}"


def is_hybrid(chunk: GPTModel) -> bool:
    """Whether a chunk is a ``HybridModel``."""
    return hasattr(chunk, "hybrid_layer_pattern")


def learn_layers(chunks: Iterable[GPTModel], hf: PretrainedConfig) -> None:
    """Store on each ``HybridModel`` of another trainer the config of its whole layers.

    Raises:
        MappingError: it has other layers than the HF config describes.
    """
    for chunk in filter(_counts_halves, chunks):
        table = architecture_of(hf).fields
        chunk.bridge_whole = copy.copy(chunk.config)
        vars(chunk.bridge_whole).update(to_mcore(table, without_unread(hf, table)))
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


def numbering_of(chunk: GPTModel) -> Numbering:
    """The global numbers of a chunk's layers and experts, read from its modules."""
    indices = (getattr(module, "local_expert_indices", None) for module in chunk.modules())
    experts = next((tuple(numbers) for numbers in indices if numbers is not None), ())
    mtp = getattr(chunk, "mtp", None)
    layers = layers_of_chunk(chunk)
    return Numbering(layers, experts, tuple(layer.layer_number - 1 for layer in mtp.layers) if mtp is not None else ())
