"""Encodes weights for an export: each rank makes the codes and scales of its own shards, as a message needs them.

A block keeps the scale of the folder that the model came from if this scale reproduces all numbers of the block.
Otherwise it gets a new one. So an untrained model leaves as its files, and after a step only changed blocks are new. A
block that several ranks share gets its scale from the maximum over these ranks. A maximum is exact in any order, so the
bits do not depend on the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mcore_bridge.errors import ExportError
from mcore_bridge.rules.mapping import unstacked
from mcore_bridge.rules.scheme import Scheme, joined_names
from mcore_bridge.rules.spec import TensorSpec
from mcore_bridge.weights.plan.boxes import RowSizes
from mcore_bridge.weights.plan.encoded_entries import encoded_entries, whole_trace
from mcore_bridge.weights.plan.inventory import EncodedPart, ParamEntry, Role
from mcore_bridge.weights.sent.encoded_shard import EncodedShard, largest_of, num_shared
from mcore_bridge.weights.sent.launches import EncodeLaunch, KernelShard, ShardEncoder, blocks_of
from mcore_bridge.weights.source.weight_format import WeightFormat
from mcore_bridge.weights.transfer.collectives import Group
from mcore_bridge.weights.transfer.copier import Buffers, runs_kernel
from mcore_bridge.weights.transfer.endpoints import Held, check_storage
from mcore_bridge.weights.transfer.failures import raise_on_all
from mcore_bridge.weights.transfer.program import Program

Key = tuple[str, tuple[int, ...]]
"""The canonical name of a weight, and the numbers of those of its parts that are encoded alike."""


def encode_shards(
    program: Program, group: Group, held: Held, form: WeightFormat, trained: Callable[[], Mapping[str, Tensor]]
) -> Held:
    """Add the codes and scales that an export of ``program`` sends to what this rank sends.

    All ranks of the group call it together. They communicate once, and only if a block lies on several ranks.

    Args:
        held: what this rank sends of plain weights.
        form: the format in which weights leave.
        trained: returns the largest magnitudes for which training rounds weights, by canonical name.

    Returns:
        ``held``, and what makes the codes and scales.

    Raises:
        ExportError: on every rank, when a weight of any rank has a number that is not finite, or no memory.
    """
    prepared, tensors = _prepared(program), held.tensors
    if not prepared.sent:
        return held
    with raise_on_all(group, kind=ExportError):
        encoder = _encoder(prepared, held, form)
        alone = {key: weight for key, weight in prepared.weights.items() if key[0] in tensors}
        if encoder is not None:
            alone = {key: weight for key, weight in alone.items() if weight.kernel is None}
        has_overall = any("overall" in weight.roles for weight in alone.values())
        known = trained() if has_overall else {}
        shards = {
            key: EncodedShard(
                weight.roles, weight.shard, tensors[key[0]].detach(), held.merges.get(key[0]), form, known.get(key[0])
            )
            for key, weight in alone.items()
        }
        check_storage({key[0]: shard.held for key, shard in shards.items()})
        device = next((tensor.device for tensor in tensors.values()), group.device)
        shared = torch.zeros(sum(prepared.shared.values()), device=device)
        for key, own in zip(prepared.shared, shared.split([*prepared.shared.values()]), strict=True):
            if key in shards:
                own.copy_(shards[key].partial())
    if len(shared):
        shared = group.maximum(shared).to(device)
        largest: dict[str, Tensor] = {}
        for key, own in zip(prepared.shared, shared.split([*prepared.shared.values()]), strict=True):
            largest |= largest_of(prepared.weights[key].roles, own)
            if key in shards:
                shards[key].agreed, shards[key].largest = own, largest
    merges = dict(held.merges)
    for sent, (key, part) in prepared.others if encoder is not None else prepared.sent.items():
        if part.constant is not None:
            merges[sent] = partial(_constant, form, part)
        elif key in shards:
            merges[sent] = partial(_made, shards[key], part.role)
    return Held(tensors, merges, encoder)


def is_by_kernel(program: Program, held: Held) -> bool:
    """Whether a kernel makes all codes and scales that this rank sends in an export of ``program``, if any."""
    prepared = _prepared(program)
    return prepared.sends_by_kernel and (not prepared.kernel or _device(held) is not None)


def _prepared(program: Program) -> _Prepared:
    if program not in _PREPARED:
        _PREPARED[program] = _Prepared.of(program)
    return _PREPARED[program]


def _device(held: Held) -> torch.device | None:
    """The GPU on which a kernel can encode; None if not all tensors of this rank are on one GPU."""
    devices = [*{tensor.device for tensor in held.tensors.values()}]
    return devices[0] if len(devices) == 1 and runs_kernel(devices[0]) else None


def _encoder(prepared: _Prepared, held: Held, form: WeightFormat) -> ShardEncoder | None:
    """The encoder of an export, if a kernel can encode anything."""
    device = _device(held) if prepared.kernel else None
    if device is None:
        return None
    merges = {
        weight.kernel.codes: (merge, held.tensors[key[0]].detach())
        for key, weight in prepared.weights.items()
        if weight.kernel is not None and (merge := held.merges.get(key[0])) is not None
    } if held.merges else {}  # fmt: skip
    launches = prepared.launches.setdefault(frozenset(merges), {})
    return ShardEncoder(prepared.kernel, form, merges, device, launches, prepared.rows)


class _Weight(NamedTuple):
    """What a weight is sent as, the number of this rank's shard, and the shard for a kernel, if one can encode it.

    There is none if another rank sends the shard.
    """

    roles: Mapping[Role, EncodedPart]
    shard: int
    kernel: KernelShard | None


@dataclass(frozen=True)
class _Prepared:
    """What all exports of a program have in common.

    Attributes:
        sent: for the name of each encoded part that is sent, the key of its weight, and the part.
        weights: the weights, by canonical name and numbers of parts.
        shared: how many numbers the holders of a weight agree on, if any.
        kernel: the shards that a kernel can encode, by the numbers of what is sent of them.
        rows: see ``Maker``.
        others: what of ``sent`` no kernel makes.
        sends_by_kernel: whether ``others`` has only what other ranks send.
        launches: the launches of exports, by the merged weights and by what is made at once.
    """

    sent: Mapping[str, tuple[Key, EncodedPart]]
    weights: Mapping[Key, _Weight]
    shared: Mapping[Key, int]
    kernel: Mapping[int, KernelShard]
    rows: RowSizes
    others: Sequence[tuple[str, tuple[Key, EncodedPart]]]
    sends_by_kernel: bool
    launches: dict[frozenset[int], dict[tuple[int, ...] | None, list[EncodeLaunch]]] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program) -> _Prepared:
        """What the exports of ``program`` have in common."""
        sent = {
            entry.held.name: ((part.plain.held.name, part.parts), part)
            for entry in program.entries
            if (part := entry.encoded) is not None
        }
        roles: dict[Key, dict[Role, EncodedPart]] = {}
        numbers: dict[tuple[Key, Role], int] = {}
        places = {name: number for number, name in enumerate(program.names)}
        for name, (key, part) in sent.items():
            if part.constant is None:
                roles.setdefault(key, {})[part.role] = part
                if name in places:
                    numbers[key, part.role] = places[name]
        weights, read = {}, {key for name, (key, _) in sent.items() if name in program.read}
        for key, own in roles.items():
            holders = own["codes"].plain.holders
            shard = next((shard for shard, ranks in holders.items() if program.rank in ranks), 0)
            blocks = blocks_of(own) if key in read else None
            kernel = None
            if blocks is not None:
                kernel = KernelShard(blocks, own["scales"], shard, numbers[key, "codes"], numbers[key, "scales"])
            weights[key] = _Weight(own, shard, kernel)
        of_kernel = {
            number: weight.kernel
            for weight in weights.values()
            if weight.kernel is not None
            for number in (weight.kernel.codes, weight.kernel.scales)
        }
        others = [pair for pair in sent.items() if places.get(pair[0]) not in of_kernel]
        shared = {key: size for key, own in roles.items() if (size := num_shared(own))}
        rows = {}
        for kernel in of_kernel.values():
            rows[kernel.codes] = kernel.blocks.row_size
        return cls(sent, weights, shared, of_kernel, rows, others, program.read.isdisjoint(name for name, _ in others))


_PREPARED: WeakKeyDictionary[Program, _Prepared] = WeakKeyDictionary()


def encoded_tensors(
    name: str,
    weight: Tensor,
    scheme: Scheme,
    form: WeightFormat,
    *,
    stack: int = 0,
    joined: Mapping[str, Tensor] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Encode one whole weight: the names and tensors of its codes and scales, or the weight if ``scheme`` lacks it.

    Args:
        name: its plain name; of an expert in a stack with its number, as ``weight[3]``. The results then have it, too.
        weight: the numbers of the weight, or of this expert.
        stack: the number of experts in the stack; 0 for other weights.
        joined: the largest magnitudes of other weights that engines join with this one; see ``joined_with``.
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
    blocks, weight = blocks_of(roles), weight.detach()
    if blocks is not None and runs_kernel(weight.device):
        encoder = ShardEncoder.of_shard(KernelShard(blocks, roles["scales"], 0, 0, 1), form, weight.device)
        (made,) = encoder.make((0, 1), Buffers([weight.contiguous()] * 2))
        encoder.check(waits=True)
        ready = dict(zip(("codes", "scales"), made.tensors(), strict=True))
    else:
        shard = EncodedShard(roles, 0, weight, None, form)
        if num_shared(roles):
            shard.agreed = shard.partial()
            shard.largest = {**largest_of(roles, shard.agreed), **(joined or {})}
        ready = {role: shard.made(role) for role in roles}
    for of in entries:
        assert of.encoded is not None
        sent = _constant(form, of.encoded, weight) if of.encoded.constant else ready[of.encoded.role]
        yield of.hf[0], sent.view(of.shape_of(0))


def joined_with(name: str, scheme: Scheme) -> list[str]:
    """The other weights that have one overall number with a weight, if its encoding has such a number."""
    held = scheme.held
    alike = [other for other in joined_names(name) if other in held and held[other].overall is not None]
    return [other for other in alike if other != name] if name in alike else []


def _constant(form: WeightFormat, part: EncodedPart, held: Tensor) -> Tensor:
    spec = part.constant
    assert spec is not None
    own = form.raw(spec.name)
    own = torch.tensor(part.encodings[0].shape, dtype=spec.dtype) if own is None else own.flatten()
    return own.to(held.device)


def _made(shard: EncodedShard, role: Role, held: Tensor) -> Tensor:
    return shard.made(role)
