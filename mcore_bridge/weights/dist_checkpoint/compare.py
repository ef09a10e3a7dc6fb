"""Compares the tensors that models need with a checkpoint of megatron-core, before anything is read or written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mcore_bridge.errors import CheckpointError, plural
from mcore_bridge.rules.adapters import is_adapter
from mcore_bridge.rules.dtypes import dtype_name, is_exact
from mcore_bridge.rules.names import plain_key
from mcore_bridge.weights.dist_checkpoint.adapter_shards import Part, is_in
from mcore_bridge.weights.dist_checkpoint.folder import TorchDistFolder
from mcore_bridge.weights.model_tensors import tensors_of
from mcore_bridge.weights.transfer.collectives import Group

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

_HINT = '. There are adapters: part="base" or part="adapters" reads only one of the two'


def chunk_names(chunks: Sequence[GPTModel]) -> list[str]:
    """The name that megatron-core's trainer gives to the state of each chunk."""
    return ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]


def sharded_states(
    chunks: Sequence[GPTModel], metadata: Mapping[str, Any], part: Part = "everything"
) -> dict[str, Any]:
    """The sharded state dict of each chunk, or a part of it, by the name of the chunk.

    Raises:
        CheckpointError: the sharded state dict of a module omits tensors that the module holds.
    """
    states = [chunk.sharded_state_dict(metadata=dict(metadata)) for chunk in chunks]
    for chunk, state in zip(chunks, states, strict=True):
        listed = {id(sharded.data) for sharded in state.values()}
        omitted = [name for name, tensor in tensors_of(chunk) if id(tensor) not in listed]
        if omitted:
            raise CheckpointError(
                f"sharded_state_dict of this model omits {omitted[:8]}: define sharded_state_dict in the modules "
                "that hold them"
            )
    parts = ({name: sharded for name, sharded in state.items() if is_in(part, name)} for state in states)
    return dict(zip(chunk_names(chunks), parts, strict=True))


class Check:
    """Compares the entries of a model with a folder, and changes their keys to the spelling of the folder.

    Args:
        vocab: rows of the vocabulary that are not padding.
        dtype: cast tensors to this first; None keeps the dtype of the folder.
        part: the part to read; other tensors of the folder are ignored.
    """

    def __init__(
        self, folder: TorchDistFolder, vocab: int, dtype: torch.dtype | None, part: Part = "everything"
    ) -> None:
        self.folder, self.vocab, self.dtype, self.part = folder, vocab, dtype, part
        self.spelled = folder.spelled()
        self.cast: dict[str, str] = {}
        self._wanted: set[str] = set()
        self._missing: list[str] = []
        self._wrong: list[str] = []

    def compare(self, state: dict[str, Any]) -> None:
        """Check the entries of this rank, and remove missing ones from ``state``. This does not communicate."""
        from megatron.core.dist_checkpointing.mapping import ShardedObject

        for part in state.values():
            for name, sharded in list(part.items()):
                if isinstance(sharded, ShardedObject):  # TransformerEngine's extra state, empty without fp8
                    if sharded.unique_key not in self.folder.metadata.state_dict_metadata:
                        del part[name]
                    continue
                sharded.key = self.spelled.get(plain_key(sharded.key), sharded.key)
                leaves = leaves_of(sharded)
                self._wanted |= {leaf.key for leaf in leaves}
                absent = [leaf.key for leaf in leaves if leaf.key not in self.folder.tensors]
                self._missing += absent
                if absent:
                    del part[name]
                else:
                    self._wrong += [problem for leaf in leaves for problem in self._problems(leaf)]

    def agree(self, group: Group, *, strict: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The missing keys and the unexpected keys, for the whole model.

        Args:
            group: the ranks of a replica.
            strict: whether such keys raise.

        Raises:
            CheckpointError: on all ranks of ``group``.
        """
        answers = group.all_gather_object((self._wanted, self._missing, self._wrong))
        wanted_by_rank, missing_by_rank, wrong_by_rank = zip(*answers, strict=True)
        lacking = tuple(sorted(set().union(*missing_by_rank)))
        present = {key for key in self.folder.tensors if is_in(self.part, key)}
        unexpected = tuple(sorted(present - set().union(*wanted_by_rank)))
        problems = sorted(set().union(*wrong_by_rank))
        if problems:
            raise CheckpointError(f"{self.folder.path} does not fit the model: {'; '.join(problems[:8])}")
        has_adapters = any(map(is_adapter, (*lacking, *unexpected, *present)))
        if strict and (lacking or unexpected):
            raise CheckpointError(
                f"{self.folder.path} does not fit the model: {plural(len(lacking), 'tensor')} missing "
                f"{list(lacking[:8])}, {len(unexpected)} unexpected {list(unexpected[:8])}. Use the checkpoint "
                f"of this config{_HINT if has_adapters else ''}",
                in_python="load_checkpoint(strict=False) reports them instead",
            )
        return lacking, unexpected

    def _problems(self, sharded: Any) -> Iterator[str]:
        """Yield the reasons why a tensor of the folder cannot be read into a parameter."""
        key, stored = sharded.key, self.folder.tensors[sharded.key]
        held = stored.properties.dtype if self.dtype is None else self.dtype
        own, wanted = sharded.dtype, tuple(sharded.global_shape)
        if not is_exact(held, own):
            yield (
                f"{key} is {dtype_name(held)} and the parameter {dtype_name(own)}, which cannot hold all its values: "
                f"pass dtype=torch.{dtype_name(own)} to cast, or build the model in another dtype"
            )
        elif stored.properties.dtype != own:
            self.cast[key] = f"{dtype_name(stored.properties.dtype)} -> {dtype_name(own)}"
        shape = tuple(stored.size)
        padded = getattr(sharded, "allow_shape_mismatch", False) and shape[0] >= self.vocab
        if shape[padded:] != wanted[padded:]:
            yield f"{key} has shape {shape}, the model takes {wanted}: load the checkpoint of this config"


def dtypes_of(
    folder: TorchDistFolder, state: Mapping[str, Any]
) -> tuple[dict[str, torch.dtype], dict[str, torch.dtype]]:
    """The dtypes of this rank's tensors in ``folder`` and in its sharded ``state``, by a common name."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    spelled = folder.spelled()
    leaves = [
        leaf
        for part in state.values()
        for sharded in part.values()
        if not isinstance(sharded, ShardedObject)
        for leaf in leaves_of(sharded)
    ]
    written = {plain_key(leaf.key): leaf.dtype for leaf in leaves}
    return {key: folder.tensors[spelled[key]].properties.dtype for key in written if key in spelled}, written


def leaves_of(sharded: Any) -> list[Any]:
    """The entries of the folder for one entry of a rank: one, or several if megatron-core splits it."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    return [sharded] if isinstance(sharded, ShardedTensor) else list(nested_values(sharded.build()))
