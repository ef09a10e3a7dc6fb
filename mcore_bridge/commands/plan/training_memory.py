"""Estimates the memory of a rank in training: with gradients, the optimizer and activations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from mcore_bridge.commands.plan.activations import kept_by_layers, kept_by_output, kept_by_recomputation

if TYPE_CHECKING:
    from mcore_bridge.commands.options import Batch
    from mcore_bridge.commands.plan.mesh_plan import Chunk
    from mcore_bridge.config.mesh.parallel_dims import ParallelDims
    from mcore_bridge.config.mesh.pipeline import Stage
    from mcore_bridge.factory.blueprint import Blueprint
    from mcore_bridge.factory.param_count import ParamCounts

GRADIENT = 4
"""Bytes of a gradient: trainers sum gradients in fp32 (``grad_reduce_in_fp32``)."""
OPTIMIZER = 12
"""Bytes of Adam's state for a parameter in half precision: a copy in fp32 and two moments."""


@dataclass(frozen=True, slots=True)
class RankSize:
    """The part of the model on one rank: the number of trained parameters, and the bytes of all tensors."""

    num_parameters: int
    num_expert_parameters: int
    num_bytes: int


def rank_sizes(blueprint: Blueprint, ranks: Iterable[Sequence[Chunk]]) -> list[RankSize]:
    """The sizes by pipeline rank, from the chunks of each rank, as megatron-core builds them."""
    return [
        RankSize(
            sum(chunk.num_parameters for chunk in chunks) - _num_frozen(blueprint, chunks),
            sum(chunk.experts.num_parameters for chunk in chunks),
            sum(chunk.num_bytes for chunk in chunks),
        )
        for chunks in ranks
    ]


def counted_sizes(blueprint: Blueprint, counts: ParamCounts) -> list[RankSize]:
    """The sizes by pipeline rank, from counted parameters. Tensor parallelism is assumed to cut all but experts.

    Args:
        blueprint: the model on its mesh.
        counts: parameters of the whole model.
    """
    dims = blueprint.dims
    sizes = []
    for pp_rank in range(dims.pp):
        stages = [stage for stage in blueprint.stages if stage.pp_rank == pp_rank]
        layers = [layer for stage in stages for layer in stage.layers]
        experts = sum(counts.experts[layer] for layer in layers)
        dense = sum(counts.layers[layer] for layer in layers) - experts
        has_loss = any(stage.loss for stage in stages)
        shares = blueprint.provenance.head == "lm" and counts.lm_head == 0
        is_tied = shares and not any(stage.embedding for stage in stages)
        dense += counts.embedding * any(stage.embedding for stage in stages)
        dense += has_loss * (counts.lm_head + counts.rest + counts.embedding * is_tied)
        numel = dense // dims.tp + experts // (dims.ep * dims.etp)
        tower = counts.tower * any(stage.embedding for stage in stages)
        trained = numel + tower * (blueprint.provenance.vision != "frozen")
        num_bytes = (numel + tower) * blueprint.dtype.itemsize
        sizes.append(RankSize(trained, experts // (dims.ep * dims.etp), num_bytes))
    return sizes


def _num_frozen(blueprint: Blueprint, chunks: Iterable[Chunk]) -> int:
    if blueprint.provenance.vision != "frozen":
        return 0
    return sum(spec.numel for spec in blueprint.provenance.tower) * any(chunk.has_tower for chunk in chunks)


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Bytes on one rank at the end of a forward pass. Memory of kernels and of the allocator is not counted.

    Attributes:
        parameters: all tensors of the model.
        gradients: in fp32.
        optimizer: Adam's state, sharded over data parallel ranks.
        activations: tensors that layers keep for the backward pass.
        logits: tensors that the output layer and the loss keep.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(getattr(self, field.name) for field in fields(self))


def training_memory(
    blueprint: Blueprint, ranks: Sequence[RankSize], *, world_size: int, batch: Batch
) -> TrainingMemory:
    """The memory of the pipeline rank that needs most.

    Megatron-core's distributed optimizer and its 1F1B schedule are assumed, with at least as many microbatches as
    pipeline ranks.

    Args:
        blueprint: the model on its mesh.
        ranks: the part of the model on a rank of each pipeline stage.
        world_size: the ranks of the whole job.
        batch: the batch of one step on one replica.
    """
    memories = [_of_rank(blueprint, pp_rank, held, world_size, batch) for pp_rank, held in enumerate(ranks)]
    return max(memories, key=lambda memory: memory.total)


def _of_rank(blueprint: Blueprint, pp_rank: int, held: RankSize, world_size: int, batch: Batch) -> TrainingMemory:
    dims, experts = blueprint.dims, held.num_expert_parameters
    dense = held.num_parameters - experts
    state = OPTIMIZER if blueprint.dtype.itemsize < 4 else OPTIMIZER - 4  # parameters in fp32 need no copy
    stages = [stage for stage in blueprint.stages if stage.pp_rank == pp_rank]
    return TrainingMemory(
        parameters=held.num_bytes,
        gradients=GRADIENT * held.num_parameters,
        optimizer=state * dense // (dims.dp(world_size) * dims.cp) + state * experts // dims.edp(world_size),
        activations=_activations(blueprint, stages, batch),
        logits=_logits(blueprint, batch) if any(stage.loss for stage in stages) else 0,
    )


def _activations(blueprint: Blueprint, stages: Sequence[Stage], batch: Batch) -> int:
    dims, config = blueprint.dims, blueprint.config
    whole = kept_by_layers(config)
    layers = [layer for stage in stages for layer in stage.layers]
    if batch.recompute:
        again = max((whole[layer] for layer in layers), default=0)  # activations of the layer that is recomputed
        kept = again + kept_by_recomputation(config) * len(layers) * _in_flight(dims, stages[0].pp_rank)
    else:
        kept = sum(whole[layer] for layer in layers) * _in_flight(dims, stages[0].pp_rank)
    return int(kept * _tokens(dims, batch) * blueprint.dtype.itemsize / (dims.tp if dims.sp else 1))


def _logits(blueprint: Blueprint, batch: Batch) -> int:
    vocabulary = blueprint.hf.vocab_size // blueprint.dims.tp
    kept = kept_by_output(blueprint.config, vocabulary)
    return int(kept * _tokens(blueprint.dims, batch) * blueprint.dtype.itemsize)


def _tokens(dims: ParallelDims, batch: Batch) -> int:
    """Tokens of a microbatch on one context-parallel rank."""
    return -(-batch.sequence * batch.micro_batch // dims.cp)


def _in_flight(dims: ParallelDims, pp_rank: int) -> float:
    """Microbatches whose forward pass of a whole rank waits for its backward pass, in the schedule's steady state."""
    if dims.vp == 1:
        return dims.pp - pp_rank
    return ((dims.pp - pp_rank - 1) * 2 + (dims.vp - 1) * dims.pp + 1) / dims.vp
