"""Encodes weights for an export: each rank makes the codes and scales of its own shards, as a message needs them.

A block keeps the scale of the folder that the model came from if this scale reproduces all numbers of the block.
Otherwise it gets a new one. So an untrained model leaves as its files, and after a step only changed blocks are new. A
block that several ranks share gets its scale from the maximum over these ranks. A maximum is exact in any order, so the
bits do not depend on the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from mcore_bridge.errors import ExportError
from mcore_bridge.rules.mapping import unstacked
from mcore_bridge.rules.scheme import Scheme
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.plan.encoded_entries import encoded_entries, whole_trace
from mcore_bridge.weights.plan.inventory import EncodedPart, ParamEntry, Role
from mcore_bridge.weights.sent.batches import batch
from mcore_bridge.weights.sent.encoded_shard import EncodedShard, num_shared
from mcore_bridge.weights.source.weight_format import WeightFormat
from mcore_bridge.weights.transfer.collectives import Group
from mcore_bridge.weights.transfer.endpoints import Merge, check_storage
from mcore_bridge.weights.transfer.failures import raise_on_all
from mcore_bridge.weights.transfer.program import Program

Held = tuple[Mapping[str, Tensor], Mapping[str, Merge]]
"""Tensors by name, and the functions from some of them to what is sent."""


def encode_shards(
    program: Program,
    group: Group,
    tensors: Mapping[str, Tensor],
    merges: Mapping[str, Merge],
    shard_of: Callable[[str], int],
    form: WeightFormat,
) -> Held:
    """Add the codes and scales that an export of ``program`` sends to the tensors of this rank.

    All ranks of the group call it together. They communicate once, and only if a block lies on several ranks.

    Args:
        tensors, merges: this rank's tensors by canonical name, and the functions from some of them to what is sent.
        shard_of: gives the number of the shard that this rank has of a tensor.
        form: the format in which weights leave.

    Returns:
        Tensors and functions, with names for what is sent of encoded weights.

    Raises:
        ExportError: on every rank, when a weight of any rank has a number that is not finite, or no memory.
    """
    encoded = {entry.held.name: entry.encoded for entry in program.entries if entry.encoded is not None}
    if not encoded:
        return tensors, merges
    weights: dict[tuple[str, tuple[int, ...]], dict[Role, EncodedPart]] = {}
    for part in encoded.values():
        if part.constant is None:
            weights.setdefault((part.plain.held.name, part.parts), {})[part.role] = part
    sizes = {key: num_shared(roles) for key, roles in weights.items()}
    with raise_on_all(group, kind=ExportError):
        shards = {
            key: EncodedShard(roles, shard_of(key[0]), tensors[key[0]].detach(), merges.get(key[0]), form)
            for key, roles in weights.items()
            if key[0] in tensors
        }
        check_storage({key[0]: shard.held for key, shard in shards.items()})
        device = next((tensor.device for tensor in tensors.values()), group.device)
        shared = torch.zeros(sum(sizes.values()), device=device)
        for key, own in zip(sizes, shared.split([*sizes.values()]), strict=True):
            if len(own) and key in shards:
                own.copy_(shards[key].partial())
    if len(shared):
        shared = group.maximum(shared).to(device)
        for key, own in zip(sizes, shared.split([*sizes.values()]), strict=True):
            if len(own) and key in shards:
                shards[key].agreed = own
    batch(shards.values())
    sources, made = dict(tensors), dict(merges)
    for sent, part in encoded.items():
        if (held := tensors.get(part.plain.held.name)) is not None:
            sources[sent] = held
            if part.constant is not None:
                made[sent] = partial(_constant, form, part)
            else:
                made[sent] = partial(_made, shards[part.plain.held.name, part.parts], part.role)
    return sources, made


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
    batch([shard])
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
