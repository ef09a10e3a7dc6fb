"""mcore to HF: agree on a plan, run it bucket by bucket, yield HF tensors. The one iterator that everything consumes.

Nothing communicates until the first ``next``. A plan is kept until anything that it rests on has changed on any rank. A
rank that stops early keeps sending until all have stopped; one that fails makes every rank of its group raise.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mcore_bridge.errors import BridgeError, ExportError
from mcore_bridge.weights.bound import Models, bind, chunks_of, noted
from mcore_bridge.weights.dtypes import Dtypes, wanted_dtype
from mcore_bridge.weights.plan import Bucket, Entry, ExportPlan, assemble, pack, plan_export, view
from mcore_bridge.weights.provenance import HF, Dialect
from mcore_bridge.weights.transport import Group, State

BUCKET_BYTES = 512 << 20

Pairs = Generator[tuple[str, Tensor], None, None]


@dataclass(frozen=True, slots=True)
class _Kept:
    """A plan, and what it rests on on this rank."""

    fingerprint: object
    plan: ExportPlan


_plans: weakref.WeakKeyDictionary[nn.Module, _Kept] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Export:
    """A model ready to be exported: the same plan on every rank of ``group``, and this rank's tensors."""

    plan: ExportPlan
    group: Group
    tensors: Mapping[str, Tensor]


def iter_hf_weights(
    models: Models,
    *,
    hf: HF | None = None,
    head: str = "lm",
    dtype: Dtypes = None,
    device: torch.device | str | None = None,
    dialect: Dialect | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every HF tensor, whole, on every rank: same names, order, shapes and bits everywhere.

    All ranks of a model replica (tensor, expert and pipeline ranks) iterate together; replicas do so on their own.
    Tensors are detached copies that the caller may keep. A rank may stop early: close the generator (or let go of it),
    and it goes on sending what the others still need before ``close`` returns.

    Args:
        models: this rank's chunks, wrapped or not; parameters may be on CPU while the group is NCCL.
        hf, head: for models that ``build_model`` did not make: their HF config or folder, and their head.
        dtype: cast to this on the way out; by default each tensor has its own.
        device: where tensors are yielded; by default where the group communicates.
        dialect: "split" gives each routed expert a tensor of its own, "fused" those of a layer one for all; None is as
            the checkpoint has it that the model came from.
        bucket_bytes: bytes that a rank receives per message. About two buckets and one tensor are held in memory.

    Raises:
        ExportError: on every rank of the group, when any of them fails; names rank and parameter.
    """
    export = open_export(models, hf, head, dialect=dialect, bucket_bytes=bucket_bytes)
    with closing(_run(export)) as pairs:
        for name, tensor in pairs:
            yield name, tensor.to(device or tensor.device, wanted_dtype(name, tensor.dtype, dtype))


def to_hf_state_dict(
    models: Models,
    *,
    hf: HF | None = None,
    head: str = "lm",
    dtype: Dtypes = None,
    device: torch.device | str | None = None,
    dialect: Dialect | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> dict[str, Tensor]:
    """``iter_hf_weights``, collected: the whole HF state dict on every rank."""
    pairs = iter_hf_weights(
        models, hf=hf, head=head, dtype=dtype, device=device, dialect=dialect, bucket_bytes=bucket_bytes
    )
    return dict(pairs)


def open_export(
    models: Models, hf: HF | None, head: str, *, dialect: Dialect | None = None, bucket_bytes: int = BUCKET_BYTES
) -> Export:
    """Agree with the group on a plan: one small collective when nothing has changed, one exchange when something has.

    Raises:
        ExportError: on every rank, when any rank cannot export.
    """
    first = chunks_of(models)[0]
    group = Group.of_replica(first.pg_collection)
    bound, error = None, ""
    try:
        bound = bind(models, noted(models, hf, head), dialect=dialect)
        _check_storage(bound.tensors)
    except BridgeError as problem:
        error = str(problem)
    inventory = bound.inventory() if bound else None
    fingerprint = (inventory, bound and (bound.mapping, bound.axes), group.rank, group.size, bucket_bytes)
    kept = _plans.get(first)
    stale = kept is None or kept.fingerprint != fingerprint
    if group.any(stale or bool(error)):
        answers = group.exchange((inventory, bucket_bytes, bound and bound.mapping.rules, error))
        _raise_failures([message for _, _, _, message in answers])
        if len({size for _, size, _, _ in answers}) > 1:
            raise ExportError(
                f"bucket_bytes differs between ranks: {[answer[1] for answer in answers]}; pass one value"
            )
        assert bound is not None
        if any(rules != bound.mapping.rules for _, _, rules, _ in answers):
            raise ExportError("the ranks name weights by different rules; pass the same hf, head and dialect on each")
        inventories = [each for each, _, _, _ in answers if each is not None]
        num_layers = first.config.num_layers
        plan = plan_export(bound.mapping, bound.axes, num_layers, inventories, bucket_bytes=bucket_bytes)
        kept = _plans[first] = _Kept(fingerprint, plan)
    assert bound is not None
    assert kept is not None
    return Export(kept.plan, group, bound.tensors)


def _check_storage(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_meta or tensor.untyped_storage().nbytes() < tensor.nbytes:
            raise ExportError(f"{name} has no storage: it is on the meta device or its memory was freed; bring it back")


def _raise_failures(messages: Sequence[str]) -> None:
    failures = [f"rank {rank} of the group: {message}" for rank, message in enumerate(messages) if message]
    if failures:
        raise ExportError("; ".join(failures))


def _run(export: Export) -> Pairs:
    if export.group.size == 1:
        yield from _run_alone(export)
        return
    closed, failure = False, None
    for bucket in export.plan.buckets:
        window = export.group.window(bucket.num_bytes)
        try:
            if failure is None:
                pack(bucket, export.group.rank, export.tensors, export.group.body(window))
        except Exception as problem:  # whatever it is, the others are waiting for this window
            failure = _failure(problem, bucket)
        state = State.FAILED if failure else State.CLOSED if closed else State.CONSUMING
        gathered = export.group.gather(window, state, str(failure or ""))
        _raise_failures(gathered.messages)
        if all(other is State.CLOSED for other in gathered.states):
            return
        try:
            if not closed:
                yield from _unpack(bucket, gathered.windows)
        except GeneratorExit:
            closed = True
        except Exception as problem:
            failure = _failure(problem, bucket)
    if failure:
        raise failure


def _failure(problem: Exception, bucket: Bucket) -> ExportError:
    names = [entry.held.mcore for entry in bucket.entries]
    return ExportError(f"{type(problem).__name__} in the bucket of {names[0]} to {names[-1]}: {problem}")


def _unpack(bucket: Bucket, windows: Tensor) -> Pairs:
    def shard_of(entry: Entry, index: int) -> Tensor:
        shard = entry.shards[index]
        return view(windows[shard.sender], entry, shard)

    yield from assemble(bucket, shard_of, windows.device)


def _run_alone(export: Export) -> Pairs:
    for bucket in export.plan.buckets:
        device = export.tensors[bucket.entries[0].held.mcore].device
        yield from assemble(bucket, lambda entry, _: export.tensors[entry.held.mcore].detach(), device)
