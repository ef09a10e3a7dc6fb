"""What models ask of a checkpoint of megatron-core, held against what is there, before anything is read or written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mcore_bridge.errors import CheckpointError
from mcore_bridge.rules.names import plain_key
from mcore_bridge.weights.dist_checkpoint.folder import TorchDistFolder
from mcore_bridge.weights.dtypes import dtype_name, is_exact
from mcore_bridge.weights.model_tensors import held_tensors
from mcore_bridge.weights.transfer.collectives import Group

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


def chunk_names(chunks: Sequence[GPTModel]) -> list[str]:
    """What megatron-core's trainer calls the state of each chunk."""
    return ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]


def sharded_states(chunks: Sequence[GPTModel], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What megatron-core says that each chunk holds, and where it lies in the whole model.

    Raises:
        CheckpointError: a module leaves out what it holds.
    """
    states = [chunk.sharded_state_dict(metadata=dict(metadata)) for chunk in chunks]
    for chunk, state in zip(chunks, states, strict=True):
        said = {id(sharded.data) for sharded in state.values()}
        left_out = [name for name, tensor in held_tensors([chunk]).items() if id(tensor) not in said]
        if left_out:
            raise CheckpointError(
                f"sharded_state_dict of this model leaves out {left_out[:8]}: give the modules that hold them one"
            )
    return dict(zip(chunk_names(chunks), states, strict=True))


class Check:
    """Holds what a model asks for against what a folder has, and takes over how the folder spells it.

    Args:
        vocab: rows of the vocabulary that are not padding.
        dtype: what tensors are cast to; None is that of the folder.
    """

    def __init__(self, found: TorchDistFolder, vocab: int, dtype: torch.dtype | None) -> None:
        self.found, self.vocab, self.dtype = found, vocab, dtype
        self.spelled = found.spelled()
        self.cast: dict[str, str] = {}
        self._wanted: set[str] = set()
        self._missing: list[str] = []
        self._wrong: list[str] = []

    def compare(self, state: dict[str, Any]) -> None:
        """Check what this rank asks for, and leave out of it what is missing. No collective."""
        from megatron.core.dist_checkpointing.mapping import ShardedObject

        for part in state.values():
            for name, sharded in list(part.items()):
                if isinstance(sharded, ShardedObject):  # TransformerEngine's own state, empty but for fp8
                    if sharded.unique_key not in self.found.metadata.state_dict_metadata:
                        del part[name]
                    continue
                sharded.key = self.spelled.get(plain_key(sharded.key), sharded.key)
                leaves = leaves_of(sharded)
                self._wanted |= {leaf.key for leaf in leaves}
                absent = [leaf.key for leaf in leaves if leaf.key not in self.found.tensors]
                self._missing += absent
                if absent:
                    del part[name]
                else:
                    self._wrong += [problem for leaf in leaves for problem in self._problems(leaf)]

    def agree(self, group: Group, *, strict: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Of the whole model, what is missing and what is unexpected on any rank of ``group``, a replica.

        Raises:
            CheckpointError: on all of them.
        """
        answers = group.all_gather_object((self._wanted, self._missing, self._wrong))
        lacking = tuple(sorted({key for _, each, _ in answers for key in each}))
        unexpected = tuple(sorted(self.found.tensors.keys() - set().union(*(each for each, _, _ in answers))))
        problems = sorted({problem for _, _, each in answers for problem in each})
        if problems:
            raise CheckpointError(f"{self.found.path} does not fit the model: {'; '.join(problems[:8])}")
        if strict and (lacking or unexpected):
            raise CheckpointError(
                f"{self.found.path} does not fit the model: {len(lacking)} tensors missing {list(lacking[:8])}, "
                f"{len(unexpected)} unexpected {list(unexpected[:8])}. Use the checkpoint of this config, or "
                "strict=False to have them reported"
            )
        return lacking, unexpected

    def _problems(self, sharded: Any) -> Iterator[str]:
        """Why a tensor that is there cannot be read."""
        key, stored = sharded.key, self.found.tensors[sharded.key]
        held = stored.properties.dtype if self.dtype is None else self.dtype
        own, wanted = sharded.dtype, tuple(sharded.global_shape)
        if not is_exact(held, own):
            yield (
                f"{key} is {dtype_name(held)} and the parameter {dtype_name(own)}, which cannot hold all its values: "
                f"pass dtype=torch.{dtype_name(own)} to cast, or build the model in another dtype"
            )
        elif stored.properties.dtype != own:
            self.cast[key] = f"{dtype_name(stored.properties.dtype)} -> {dtype_name(own)}"
        found = tuple(stored.size)
        padded = getattr(sharded, "allow_shape_mismatch", False) and found[0] >= self.vocab
        if found[padded:] != wanted[padded:]:
            yield f"{key} has shape {found}, the model takes {wanted}: is this the checkpoint of this config?"


def leaves_of(sharded: Any) -> list[Any]:
    """The tensors of the folder that one of a rank is part of: one, or those that megatron-core makes of it."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    return [sharded] if isinstance(sharded, ShardedTensor) else list(nested_values(sharded.build()))
