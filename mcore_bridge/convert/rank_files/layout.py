"""Which file of a checkpoint holds which shard of which parameter, and under what name: from a config and a mesh."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.config.mesh.pipeline import Stage
from mcore_bridge.convert.parameters import Source, assemble_shard
from mcore_bridge.convert.rank_files.local_names import fused_norm, local_expert
from mcore_bridge.errors import CheckpointError, MeshError
from mcore_bridge.factory.blueprint import to_gpt_arguments, to_transformer_config
from mcore_bridge.rules.layout import Axes, Layout
from mcore_bridge.rules.mapping import Binding, WeightMapping, axes_of, unstacked
from mcore_bridge.rules.names import INDEXER, expert_of, fused_norms, layer_of, shift_expert
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.rules.trace import Shape, Trace, trace
from mcore_bridge.weights.bound import axes_of_config
from mcore_bridge.weights.dist_checkpoint.extra_state import ExtraState
from mcore_bridge.weights.provenance import HF, Provenance, provenance_of


@dataclass(frozen=True, slots=True)
class Style:
    """How a ``GPTModel`` that loads the files has its parameters.

    Attributes:
        fused_norms: norms are in TransformerEngine's linears behind them.
        grouped: the experts of a layer are one module, which numbers them.
        extra_state: what stands for the extra state of TransformerEngine's modules; None leaves it out.
    """

    fused_norms: bool = True
    grouped: bool = False
    extra_state: ExtraState = "tensor_pickle_none"


def folder_of(dims: ParallelDims, tp_rank: int, pp_rank: int, ep_rank: int) -> str:
    """Where the file of these ranks lies, as Megatron's ``get_checkpoint_name`` has it."""
    stage = f"_{pp_rank:03d}" if dims.pp > 1 else ""
    experts = f"_{ep_rank:03d}" if dims.ep > 1 else ""
    return f"mp_rank_{tp_rank:02d}{stage}{experts}"


def chunk_of(dims: ParallelDims, vp_stage: int) -> str:
    """The key of a chunk in a file."""
    return "model" if dims.vp == 1 else f"model{vp_stage}"


@dataclass(frozen=True, slots=True)
class RankFile:
    """One file of a checkpoint, and the place of the ranks that load it."""

    name: str
    tp_rank: int
    pp_rank: int
    ep_rank: int
    etp_rank: int


@dataclass(frozen=True)
class FileLayout:
    """A checkpoint of Megatron's ``torch`` format: parameters, without an optimizer.

    Args:
        hf: the HF config or folder.
        dims: the mesh.
        specs: of all HF tensors of the source, by name.
        style: how parameters are named.
    """

    hf: HF
    dims: ParallelDims
    specs: Mapping[str, TensorSpec]
    style: Style = Style()

    @cached_property
    def provenance(self) -> Provenance:
        """Of the model."""
        return provenance_of(self.hf)

    @cached_property
    def mapping(self) -> WeightMapping:
        """The rules of the model."""
        return self.provenance.mapping(tied=bool(self.provenance.hf.tie_word_embeddings))

    @cached_property
    def axes(self) -> Axes:
        """Sizes that layouts take."""
        config = to_transformer_config(self.hf, dims=self.dims)
        padded = to_gpt_arguments(self.hf, dims=self.dims)["vocab_size"]
        assert isinstance(padded, int)
        return axes_of_config(config, vocab=self.provenance.hf.vocab_size, padded_vocab=padded)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Of the pipeline."""
        return self.dims.stages(self.provenance.hf.num_hidden_layers)

    @cached_property
    def bindings(self) -> Mapping[str, Binding]:
        """All parameters that the source has tensors for, by canonical name.

        Raises:
            CheckpointError: the source holds what the model does not, or lacks what it needs.
        """
        found: dict[str, Binding] = {}
        unexpected = []
        for name in self.specs:
            consumers = [] if self.mapping.is_unused(name, num_mtp_layers=0) else self.mapping.consumers(name)
            if not consumers and not self.mapping.is_unused(name, num_mtp_layers=0):
                unexpected.append(name)
            for mcore in consumers:
                stacked = unstacked(self.mapping.bind(mcore).hf[0])[1] is not None
                for shift in range(self.axes["experts"] if stacked else 1):
                    each = shift_expert(mcore, shift)
                    found[each] = self.mapping.bind(each)
        missing = {hf for binding in found.values() for hf in map(_whole, binding.hf) if hf not in self.specs}
        layers = {layer_of(name) for name in found} - {None}
        absent = sorted(set(range(self.provenance.hf.num_hidden_layers)) - layers)
        if unexpected or missing or absent:
            raise CheckpointError(
                f"the source does not fit the model: unexpected tensors {unexpected[:8]}, missing tensors "
                f"{sorted(missing)[:8]}, layers without any {absent[:8]}; use the checkpoint of this config"
            )
        return found

    def files(self) -> Iterator[RankFile]:
        """All files, as Megatron names them: ranks that hold the same share one.

        Raises:
            MeshError: ranks of one ``tp_rank`` hold other shards of experts, which Megatron's names have no place for.
        """
        tp, pp, ep, etp = self.dims.tp, self.dims.pp, self.dims.ep, self.dims.etp
        if tp % etp:
            raise MeshError(
                f"expected expert_tensor_parallel_size to divide tp={tp}, found {etp}: Megatron's names of files have "
                "no other place for it; change either, or write torch_dist"
            )
        for pp_rank in range(pp):
            for rank in range(math.lcm(etp * ep, tp)):
                tp_rank, ep_rank = rank % tp, rank // etp % ep
                yield RankFile(folder_of(self.dims, tp_rank, pp_rank, ep_rank), tp_rank, pp_rank, ep_rank, rank % etp)

    def held(self, file: RankFile) -> Iterator[tuple[str, str, str, int]]:
        """``(model, name, canonical name, shard)`` of each parameter in a file; ``model`` is the key of its chunk."""
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
        """The parameters of each stage, with the numbers of their experts: there may be many files of a stage."""
        return tuple(
            tuple((mcore, expert_of(mcore)) for mcore in self.bindings if self._is_in(mcore, stage))
            for stage in self.stages
        )

    def _experts(self, file: RankFile) -> range:
        each = self.axes["experts"] // self.dims.ep
        return range(file.ep_rank * each, (file.ep_rank + 1) * each)

    def _is_in(self, mcore: str, stage: Stage) -> bool:
        layer = layer_of(mcore)
        if layer is not None:
            return layer in stage.layers
        if mcore.startswith("embedding."):
            return stage.embedding
        if not self.bindings[mcore].exported and stage.embedding:  # a head that is the embedding of the same chunk
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
        """The fused norms of each layer. One whose selection is that of another layer is sparse without an indexer."""
        everywhere = {INDEXER} if any(INDEXER in mcore for mcore in self.bindings) else set[str]()
        found: dict[int, set[str]] = {}
        for mcore in self.bindings:
            if (layer := layer_of(mcore)) is not None:
                found.setdefault(layer, {*everywhere}).add(
                    mcore.removeprefix(f"decoder.layers.{layer}.").rpartition(".")[0]
                )
        return {layer: fused_norms(modules) for layer, modules in found.items()}

    def trace(self, mcore: str) -> Trace:
        """What the layout of a parameter does, at the sizes of the mesh."""
        binding = self.bindings[mcore]
        axes = axes_of(binding, self.axes)
        shapes = (self.specs[_whole(hf)].shape[unstacked(hf)[1] is not None :] for hf in binding.hf)
        return trace(binding.layout, _shard_shape(binding.layout, tuple(shapes), tuple(axes.items())), axes)

    def num_bytes(self, file: RankFile) -> int:
        """Bytes of the parameters in a file."""
        held = (mcore for _, _, mcore, _ in self.held(file))
        return sum(math.prod(self.trace(mcore).shard_shape) * self.dtype(mcore).itemsize for mcore in held)

    def dtype(self, mcore: str) -> torch.dtype:
        """Of a parameter: that of its HF tensors."""
        return self.specs[_whole(self.bindings[mcore].hf[0])].dtype

    def shard(self, mcore: str, number: int, source: Source, device: str = "cpu") -> Tensor:
        """One shard of a parameter, new, of HF tensors."""
        hf = self.bindings[mcore].hf
        return assemble_shard(self.trace(mcore), number, hf, source, self.dtype(mcore), device)


@lru_cache(maxsize=4096)
def _shard_shape(layout: Layout, part_shapes: tuple[Shape, ...], axes: tuple[tuple[str, int], ...]) -> Shape:
    """Of a parameter, whose HF tensors have these shapes; most have those of many others."""
    (shards,) = layout(tuple(torch.empty(shape, device="meta") for shape in part_shapes), dict(axes))
    return tuple(shards.shape[1:])


def _whole(hf: str) -> str:
    return unstacked(hf)[0]
