"""The layout of Megatron's ``torch`` format: which shards of which parameters are in a file, and their names there.

The layout follows from a config and a mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.config.mesh.pipeline import Stage
from mcore_bridge.convert.assemble import HFTensors, assemble_shard
from mcore_bridge.errors import CheckpointError, MeshError
from mcore_bridge.factory.gpt_inputs import to_gpt_arguments, to_transformer_config
from mcore_bridge.rules.layout import Layout
from mcore_bridge.rules.mapping import Binding, ModelAxes, WeightMapping, axes_of, unstacked
from mcore_bridge.rules.names import INDEXER, expert_of, fused_norm, fused_norms, layer_of, local_expert, shift_expert
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.rules.trace import Shape, Trace, trace
from mcore_bridge.weights.bound import axes_of_config
from mcore_bridge.weights.dist_checkpoint.extra_state import ExtraState
from mcore_bridge.weights.provenance import HF, Provenance, head_of, provenance_of


@dataclass(frozen=True, slots=True)
class Style:
    """The kind of ``GPTModel`` that loads the files, which decides the names of parameters.

    Attributes:
        fused_norms: norms are parts of TransformerEngine's following linear layers.
        grouped: the experts of a layer are one module, which numbers them.
        extra_state: the value of the extra state of TransformerEngine's modules; None omits it.
    """

    fused_norms: bool = True
    grouped: bool = False
    extra_state: ExtraState = "tensor_pickle_none"


def folder_of(dims: ParallelDims, tp_rank: int, pp_rank: int, ep_rank: int) -> str:
    """The folder for the file of these ranks, as in Megatron's ``get_checkpoint_name``."""
    stage = f"_{pp_rank:03d}" if dims.pp > 1 else ""
    experts = f"_{ep_rank:03d}" if dims.ep > 1 else ""
    return f"mp_rank_{tp_rank:02d}{stage}{experts}"


def chunk_of(dims: ParallelDims, vp_stage: int) -> str:
    """The key of a chunk in a file."""
    return "model" if dims.vp == 1 else f"model{vp_stage}"


@dataclass(frozen=True, slots=True)
class RankFile:
    """One file of a checkpoint, and the place on the mesh of the ranks that load it."""

    name: str
    tp_rank: int
    pp_rank: int
    ep_rank: int
    etp_rank: int


@dataclass(frozen=True)
class FileLayout:
    """The layout of a checkpoint in Megatron's ``torch`` format, without an optimizer.

    Args:
        hf: the HF config or folder.
        dims: the mesh.
        specs: specs of all HF tensors of the source, by name.
        style: the kind of model that loads the files.
    """

    hf: HF
    dims: ParallelDims
    specs: Mapping[str, TensorSpec]
    style: Style = Style()

    @cached_property
    def provenance(self) -> Provenance:
        """The provenance of the model."""
        return provenance_of(self.hf, head=head_of(self.hf, self.specs))

    @cached_property
    def mapping(self) -> WeightMapping:
        """The rules of the model."""
        return self.provenance.mapping(tied=bool(self.provenance.hf.tie_word_embeddings))

    @cached_property
    def axes(self) -> ModelAxes:
        """The sizes that layouts need."""
        config = to_transformer_config(self.hf, dims=self.dims)
        padded = to_gpt_arguments(self.hf, dims=self.dims)["vocab_size"]
        assert isinstance(padded, int)
        return axes_of_config(config, vocab=self.provenance.hf.vocab_size, padded_vocab=padded)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the pipeline."""
        return self.dims.stages(self.provenance.hf.num_hidden_layers)

    @cached_property
    def bindings(self) -> Mapping[str, Binding]:
        """The bindings of all parameters for which the source has tensors, by canonical name.

        Raises:
            CheckpointError: the source has tensors that the model lacks, or lacks tensors that it needs.
        """
        bindings: dict[str, Binding] = {}
        unexpected = []
        for name in self.specs:
            is_unused = self.mapping.is_unused(name)
            consumers = [] if is_unused else self.mapping.consumers(name)
            if not consumers and not is_unused:
                unexpected.append(name)
            for mcore in consumers:
                stacked = unstacked(self.mapping.bind(mcore).hf[0])[1] is not None
                for shift in range(self.axes["experts"] if stacked else 1):
                    expert = shift_expert(mcore, shift)
                    bindings[expert] = self.mapping.bind(expert)
        ends = (rule for rule in self.mapping.rules if "*" not in rule.mcore and not rule.mcore.startswith("mtp."))
        absent_ends = (rule for rule in ends if rule.mcore not in bindings and not rule.copy)
        needed = {hf for rule in absent_ends for hf in rule.hf if not self.mapping.is_optional(hf)}
        needed |= {hf for binding in bindings.values() for hf in map(_whole, binding.hf)}
        missing = needed - self.specs.keys()
        layers = {layer_of(name) for name in bindings} - {None}
        absent = sorted(set(range(self.provenance.hf.num_hidden_layers)) - layers)
        if unexpected or missing or absent:
            raise CheckpointError(
                f"the source does not fit the model: unexpected tensors {unexpected[:8]}, missing tensors "
                f"{sorted(missing)[:8]}, layers without any {absent[:8]}; use the checkpoint of this config"
            )
        return bindings

    def files(self) -> Iterator[RankFile]:
        """Yield all files, with Megatron's names. Ranks with equal parameters share a file.

        Raises:
            MeshError: ranks with one ``tp_rank`` have different shards of experts. Megatron's names cannot express it.
        """
        tp, pp, ep, etp = self.dims.tp, self.dims.pp, self.dims.ep, self.dims.etp
        if tp % etp:
            raise MeshError(
                f"expected expert_tensor_parallel_size to divide tp={tp}, found {etp}: Megatron's names of files "
                "cannot express this; change either, or write torch_dist"
            )
        for pp_rank in range(pp):
            for rank in range(math.lcm(etp * ep, tp)):
                tp_rank, ep_rank = rank % tp, rank // etp % ep
                yield RankFile(folder_of(self.dims, tp_rank, pp_rank, ep_rank), tp_rank, pp_rank, ep_rank, rank % etp)

    def held(self, file: RankFile) -> Iterator[tuple[str, str, str, int]]:
        """Yield ``(model, name, canonical name, rank)`` of each parameter in a file.

        ``model`` is the key of the chunk. ``rank`` is the rank of ``tp`` or ``etp`` whose shard the file has.
        """
        experts = self._experts(file)
        for stage, names in zip(self.stages, self._by_stage, strict=True):
            if stage.pp_rank != file.pp_rank:
                continue
            model = chunk_of(self.dims, stage.vp_stage)
            for mcore, expert in names:
                if expert is None or expert in experts:
                    shard = file.etp_rank if self.bindings[mcore].axis == "etp" else file.tp_rank
                    yield model, self._local(mcore, stage, file), mcore, shard

    @cached_property
    def _by_stage(self) -> tuple[tuple[tuple[str, int | None], ...], ...]:
        """The parameters of each stage, with the numbers of their experts. Many files may share them."""
        return tuple(
            tuple((mcore, expert_of(mcore)) for mcore in self.bindings if self._is_in(mcore, stage))
            for stage in self.stages
        )

    def _experts(self, file: RankFile) -> range:
        per_rank = self.axes["experts"] // self.dims.ep
        return range(file.ep_rank * per_rank, (file.ep_rank + 1) * per_rank)

    def _is_in(self, mcore: str, stage: Stage) -> bool:
        layer = layer_of(mcore)
        if layer is not None:
            return layer in stage.layers
        if mcore.startswith("embedding."):
            return stage.embedding
        if not self.bindings[mcore].exported and stage.embedding:  # a head that is tied to the embedding of this chunk
            return False
        return stage.loss

    def _local(self, mcore: str, stage: Stage, file: RankFile) -> str:
        layer, expert = layer_of(mcore), expert_of(mcore)
        if layer is None:
            return mcore
        prefix = f"decoder.layers.{layer}."
        name = mcore.removeprefix(prefix)
        if self.style.fused_norms:
            name = fused_norm(name, self._fused[layer]) or name
        if expert is not None:
            name = local_expert(name, expert, expert - self._experts(file).start, grouped=self.style.grouped)
        return f"decoder.layers.{layer - stage.layers.start}.{name}"

    @cached_property
    def _fused(self) -> Mapping[int, Mapping[str, str]]:
        """The fused norms of each layer. A sparse layer that reuses another layer's selection has no indexer."""
        everywhere = {INDEXER} if any(INDEXER in mcore for mcore in self.bindings) else set[str]()
        modules_of: dict[int, set[str]] = {}
        for mcore in self.bindings:
            if (layer := layer_of(mcore)) is not None:
                module = mcore.removeprefix(f"decoder.layers.{layer}.").rpartition(".")[0]
                modules_of.setdefault(layer, {*everywhere}).add(module)
        return {layer: fused_norms(modules) for layer, modules in modules_of.items()}

    def trace(self, mcore: str) -> Trace:
        """The trace of a parameter's layout, at the sizes of the mesh."""
        binding = self.bindings[mcore]
        axes = axes_of(binding, self.axes)
        shapes = (self.specs[_whole(hf)].shape[unstacked(hf)[1] is not None :] for hf in binding.hf)
        return trace(binding.layout, _shard_shape(binding.layout, tuple(shapes), tuple(axes.items())), axes)

    def num_bytes(self, file: RankFile) -> int:
        """Bytes of the parameters in a file."""
        held = (mcore for _, _, mcore, _ in self.held(file))
        return sum(math.prod(self.trace(mcore).shard_shape) * self.dtype(mcore).itemsize for mcore in held)

    def dtype(self, mcore: str) -> torch.dtype:
        """The dtype of a parameter, equal to the dtype of its HF tensors."""
        return self.specs[_whole(self.bindings[mcore].hf[0])].dtype

    def shard(self, mcore: str, number: int, source: HFTensors, device: str = "cpu") -> Tensor:
        """Assemble one shard of a parameter from HF tensors."""
        hf = self.bindings[mcore].hf
        return assemble_shard(self.trace(mcore), number, hf, source, self.dtype(mcore), device)


@lru_cache(maxsize=4096)
def _shard_shape(layout: Layout, part_shapes: tuple[Shape, ...], axes: tuple[tuple[str, int], ...]) -> Shape:
    """The shape of a shard of a parameter whose HF tensors have these shapes. Cached: many parameters share it."""
    (shards,) = layout(tuple(torch.empty(shape, device="meta") for shape in part_shapes), dict(axes))
    return tuple(shards.shape[1:])


def _whole(hf: str) -> str:
    return unstacked(hf)[0]
