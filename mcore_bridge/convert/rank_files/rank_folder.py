"""Reads checkpoints in Megatron's ``torch`` format, of any mesh and from any writer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mcore_bridge.arguments import given_path
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.convert.assemble import disassemble
from mcore_bridge.convert.rank_files.file import NAME, read_rank_file
from mcore_bridge.convert.rank_files.file_layout import RankFile
from mcore_bridge.convert.rank_files.infer_mesh import Named, files_of, named
from mcore_bridge.errors import CheckpointError, MappingError, MeshError
from mcore_bridge.factory.gpt_inputs import to_transformer_config
from mcore_bridge.rules.names import EMBEDDING, count_mtp_layers
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.bound import axes_of_config
from mcore_bridge.weights.dist_checkpoint.folder import latest_in
from mcore_bridge.weights.files.torch_save import release
from mcore_bridge.weights.plan.inventory import Inventory, ParamEntry, merge_inventories
from mcore_bridge.weights.provenance import HF, head_of, provenance_of
from mcore_bridge.weights.source.source import Source
from mcore_bridge.weights.source.tied_tensors import are_equal

_HEAD = "output_layer.weight"


@dataclass(frozen=True)
class RankFolder:
    """One checkpoint: the tensors of each file by canonical name, and the parameters that consist of them."""

    path: Path
    tensors: tuple[Named, ...]
    entries: tuple[ParamEntry, ...]

    @classmethod
    def open(cls, folder: str | os.PathLike[str], hf: HF) -> RankFolder:
        """Find a checkpoint by ``find_rank_files``, and match its files with the rules of the model.

        Raises:
            CheckpointError: there is none, it lacks files or parameters, or it does not fit this config.
        """
        path = find_rank_files(given_path(folder))
        if path is None:
            raise CheckpointError(
                f"{folder} has no mp_rank_*/{NAME}, nor has the iteration that its tracker file names"
            )
        config = to_transformer_config(hf)
        models = {file.parent.name: read_rank_file(file) for file in sorted(path.glob(f"mp_rank_*/{NAME}"))}
        try:
            files = files_of(models, config.moe_ffn_hidden_size)
            dims = _dims_of(files)
            tensors = named(files, models, (config.num_moe_experts or 0) // dims.ep)
            return cls(path, tensors, _entries(files, tensors, dims, hf))
        except (CheckpointError, MappingError, MeshError) as error:
            raise CheckpointError(f"{path} is not whole, or does not fit the given HF config: {error}") from None

    @property
    def num_mtp_layers(self) -> int:
        """The number of layers for multi-token prediction."""
        return count_mtp_layers(entry.held.name for entry in self.entries)

    def shards(self, entry: ParamEntry) -> Mapping[int, Tensor]:
        """The shards of a parameter, by number."""
        return {shard: self.tensors[holders[0]][entry.held.name] for shard, holders in entry.holders.items()}

    def release(self, entry: ParamEntry) -> None:
        """Free the memory of pages that were read for a parameter."""
        for shard in self.shards(entry).values():
            release(shard)


def find_rank_files(folder: Path) -> Path | None:
    """Find the folder with ``mp_rank_*``: this folder, or the one that its tracker file names; None without either."""
    return next((path for path in (folder, *latest_in(folder)) if any(path.glob(f"mp_rank_*/{NAME}"))), None)


def iter_mg_weights(folder: str | os.PathLike[str], hf: HF | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield every HF tensor of such a checkpoint, whole. ``load_hf_weights`` takes this as a source.

    Files are mapped, and each tensor is assembled when it is requested.

    Args:
        folder: the checkpoint, for any mesh.
        hf: the HF config or folder; None means ``folder``, to which RLinf's convertor copies the config.

    Raises:
        CheckpointError: as ``RankFolder.open``.
    """
    checkpoint = RankFolder.open(folder, hf or folder)
    stacks: dict[str, dict[int, Tensor]] = {}
    for entry in checkpoint.entries:
        for part, tensor in disassemble(entry, checkpoint.shards(entry)):
            if part.index is None:
                yield part.name, tensor
                continue
            stack = stacks.setdefault(part.name, {})
            stack[part.index] = tensor
            if len(stack) == entry.stack:
                yield part.name, torch.stack([tensor for _, tensor in sorted(stacks.pop(part.name).items())])
        checkpoint.release(entry)


def _dims_of(files: Sequence[RankFile]) -> ParallelDims:
    """The sizes of the axes that cut values or distribute experts."""
    tp, ep, etp = (1 + max(ranks) for ranks in zip(*((f.tp_rank, f.ep_rank, f.etp_rank) for f in files), strict=True))
    return ParallelDims(tp=tp, ep=ep, etp=etp)


def _entries(files: Sequence[RankFile], tensors: Sequence[Named], dims: ParallelDims, hf: HF) -> tuple[ParamEntry, ...]:
    provenance = provenance_of(hf, head=head_of(hf, (name for held in tensors for name in held)))
    vocab, rows = provenance.hf.vocab_size, dims.tp * max(len(held.get(EMBEDDING, ())) for held in tensors)
    if rows < vocab:
        raise CheckpointError(f"its files hold {rows} rows of a vocabulary of {vocab}")
    num_mtp_layers = count_mtp_layers(name for held in tensors for name in held)
    tied = bool(provenance.hf.tie_word_embeddings)
    if tied:
        _require_tied(files, tensors, vocab)
    mapping = provenance.mapping(tied=tied, mtp=num_mtp_layers)
    config = to_transformer_config(hf, dims=dims, overrides={"mtp_num_layers": num_mtp_layers or None})
    inventories = [
        Inventory(
            {"pp": file.pp_rank, "tp": file.tp_rank, "etp": file.etp_rank},
            tuple(TensorSpec.of(name, tensor) for name, tensor in held.items()),
        )
        for file, held in zip(files, tensors, strict=True)
    ]
    axes = axes_of_config(config, vocab=vocab, padded_vocab=rows)
    return merge_inventories(mapping, axes, config.num_layers, inventories)


def _require_tied(files: Sequence[RankFile], tensors: Sequence[Named], vocab: int) -> None:
    """Raise if an output layer differs from the embedding although the HF config ties them: it would be lost."""
    embeddings = {file.tp_rank: held[EMBEDDING] for file, held in zip(files, tensors, strict=True) if EMBEDDING in held}
    for file, held in zip(files, tensors, strict=True):
        if _HEAD not in held or file.tp_rank not in embeddings:
            continue
        pair = {EMBEDDING: embeddings[file.tp_rank], _HEAD: held[_HEAD]}
        rows = max(0, vocab - file.tp_rank * len(held[_HEAD]))  # the rest is padding
        if not are_equal(Source({name: tensor[:rows] for name, tensor in pair.items()}), *pair):
            raise CheckpointError(
                f"{_HEAD} of {file.name} differs from the embedding, and the HF config says "
                "tie_word_embeddings=True: set it to False, since this model has an untied head"
            )
        for tensor in pair.values():
            release(tensor)
