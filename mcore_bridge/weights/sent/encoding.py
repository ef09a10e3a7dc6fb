"""Encodes weights for an export: each rank makes the codes and scales of its own shards, as a message needs them.

A block keeps the scale of the folder that the model came from if this scale reproduces all numbers of the block.
Otherwise it gets a new one. So an untrained model leaves as its files, and after a step only changed blocks are new. A
block that several ranks share gets its scale from the maximum over these ranks. A maximum is exact in any order, so the
bits do not depend on the mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mcore_bridge.errors import ExportError
from mcore_bridge.rules.mapping import unstacked
from mcore_bridge.rules.scheme import Scheme
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.plan.encoded_entries import encoded_entries, whole_trace
from mcore_bridge.weights.plan.inventory import EncodedPart, ParamEntry, Role
from mcore_bridge.weights.sent.batches import batch
from mcore_bridge.weights.sent.block_geometry import Blocks
from mcore_bridge.weights.sent.encoded_shard import EncodedShard, num_shared
from mcore_bridge.weights.source.weight_format import WeightFormat
from mcore_bridge.weights.transfer.collectives import Group
from mcore_bridge.weights.transfer.endpoints import Merge, check_storage
from mcore_bridge.weights.transfer.failures import raise_on_all
from mcore_bridge.weights.transfer.program import Program

Key = tuple[str, tuple[int, ...]]
"""The canonical name of a weight, and the numbers of those of its parts that are encoded alike."""
Held = tuple[Mapping[str, Tensor], Mapping[str, Merge]]
"""Tensors by name, and the functions from some of them to what is sent."""


def encode_shards(
    program: Program,
    group: Group,
    tensors: Mapping[str, Tensor],
    merges: Mapping[str, Merge],
    form: WeightFormat,
) -> Held:
    """Add the codes and scales that an export of ``program`` sends to the tensors of this rank.

    All ranks of the group call it together. They communicate once, and only if a block lies on several ranks.

    Args:
        tensors, merges: this rank's tensors by canonical name, and the functions from some of them to what is sent.
        form: the format in which weights leave.

    Returns:
        Tensors and functions, with names for what is sent of encoded weights.

    Raises:
        ExportError: on every rank, when a weight of any rank has a number that is not finite, or no memory.
    """
    if program not in _PREPARED:
        _PREPARED[program] = _Prepared.of(program)
    prepared = _PREPARED[program]
    if not prepared.sent:
        return tensors, merges
    with raise_on_all(group, kind=ExportError):
        shards = {
            key: EncodedShard(weight.roles, weight.shard, tensors[key[0]].detach(), merges.get(key[0]), form)
            for key, weight in prepared.weights.items()
            if key[0] in tensors
        }
        check_storage({key[0]: shard.held for key, shard in shards.items()})
        device = next((tensor.device for tensor in tensors.values()), group.device)
        shared = torch.zeros(sum(prepared.shared.values()), device=device)
        for key, own in zip(prepared.shared, shared.split([*prepared.shared.values()]), strict=True):
            if key in shards:
                own.copy_(shards[key].partial())
    if len(shared):
        shared = group.maximum(shared).to(device)
        for key, own in zip(prepared.shared, shared.split([*prepared.shared.values()]), strict=True):
            if key in shards:
                shards[key].agreed = own
    batch((prepared.weights[key].blocks, shard) for key, shard in shards.items())
    sources, made = dict(tensors), dict(merges)
    for sent, (key, part) in prepared.sent.items():
        if (held := tensors.get(key[0])) is not None:
            sources[sent] = held
            if part.constant is not None:
                made[sent] = partial(_constant, form, part)
            else:
                made[sent] = partial(_made, shards[key], part.role)
    return sources, made


class _Weight(NamedTuple):
    """What a weight is sent as, the number of this rank's shard, and the blocks in which a kernel can encode it.

    There are no blocks if another rank sends the shard. So all shards of a batch are made.
    """

    roles: Mapping[Role, EncodedPart]
    shard: int
    blocks: Blocks | None


@dataclass(frozen=True)
class _Prepared:
    """What all exports of a program have in common.

    Attributes:
        sent: for the name of each encoded part that is sent, the key of its weight, and the part.
        weights: the weights, by canonical name and numbers of parts.
        shared: how many numbers the holders of a weight agree on, if any.
    """

    sent: Mapping[str, tuple[Key, EncodedPart]]
    weights: Mapping[Key, _Weight]
    shared: Mapping[Key, int]

    @classmethod
    def of(cls, program: Program) -> _Prepared:
        """What the exports of ``program`` have in common."""
        sent = {
            entry.held.name: ((part.plain.held.name, part.parts), part)
            for entry in program.entries
            if (part := entry.encoded) is not None
        }
        roles: dict[Key, dict[Role, EncodedPart]] = {}
        for key, part in sent.values():
            if part.constant is None:
                roles.setdefault(key, {})[part.role] = part
        weights, read = {}, {key for name, (key, _) in sent.items() if name in program.read}
        for key, own in roles.items():
            holders = own["codes"].plain.holders
            shard = next((shard for shard, ranks in holders.items() if program.rank in ranks), 0)
            weights[key] = _Weight(own, shard, Blocks.of(own) if key in read else None)
        return cls(sent, weights, {key: size for key, own in roles.items() if (size := num_shared(own))})


_PREPARED: WeakKeyDictionary[Program, _Prepared] = WeakKeyDictionary()


def encoded_tensors(
    name: str, weight: Tensor, scheme: Scheme, form: WeightFormat, *, stack: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Encode one whole weight: the names and tensors of its codes and scales, or the weight if ``scheme`` lacks it.

    Args:
        name: its plain name; of an expert in a stack with its number, as ``weight[3]``. The results then have it, too.
        weight: the numbers of the weight, or of this expert.
        stack: the number of experts in the stack; 0 for other weights.
    """
    if (encoding := scheme.held.get(unstacked(name)[0])) is None:
        yield name, weight
        return
    traced = whole_trace(tuple(weight.shape), encoding)
    if traced.to_mcore[0].view is not None:
        weight = weight.mT
    spec = TensorSpec.of(name, weight)
    entries = encoded_entries([ParamEntry(spec, (name,), traced, {0: (0,)}, stack)], scheme)
    roles = {of.encoded.role: of.encoded for of in entries if of.encoded is not None and of.encoded.constant is None}
    shard = EncodedShard(roles, 0, weight.detach(), None, form)
    if num_shared(roles):
        shard.agreed = shard.partial()
    batch([(Blocks.of(roles), shard)])
    for of in entries:
        assert of.encoded is not None
        made = _constant(form, of.encoded, weight) if of.encoded.constant else shard.made(of.encoded.role)
        yield of.hf[0], made.view(of.shape_of(0))


def _constant(form: WeightFormat, part: EncodedPart, held: Tensor) -> Tensor:
    spec = part.constant
    assert spec is not None
    own = form.raw(spec.name)
    own = torch.tensor(part.encodings[0].shape, dtype=spec.dtype) if own is None else own.flatten()
    return own.to(held.device)


def _made(shard: EncodedShard, role: Role, held: Tensor) -> Tensor:
    return shard.made(role)
