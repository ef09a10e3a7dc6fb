"""mcore to HF: agree on a plan, run it, yield HF tensors. The one iterator that everything consumes.

Nothing communicates until the first ``next``. A plan is kept until anything that it rests on has changed on any rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mcore_bridge.errors import BridgeError, ExportError
from mcore_bridge.weights.bound import Models, bind, chunks_of, noted
from mcore_bridge.weights.dtypes import Dtypes, wanted_dtype
from mcore_bridge.weights.exchange import check_storage, raise_failures, run_program
from mcore_bridge.weights.plan import plan_export
from mcore_bridge.weights.program import Program
from mcore_bridge.weights.provenance import HF, Dialect
from mcore_bridge.weights.transport import Group


@dataclass(frozen=True, slots=True)
class _Kept:
    """A plan, and what it rests on on this rank."""

    fingerprint: object
    program: Program


_plans: weakref.WeakKeyDictionary[nn.Module, _Kept] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Export:
    """A model ready to be exported: the same plan on every rank of ``group``, and this rank's tensors."""

    program: Program
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
    bucket_bytes: int | None = None,
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
        bucket_bytes: of the messages that are on their way to a rank. An export takes at most three times this, and the
            largest tensor, beside the model. None is what takes 2 GB in all, or little more than the largest tensor.
            That is so for a few ranks: each has a tensor of its own on the way, so many ranks with large tensors take
            more, and ``mcore-bridge plan`` says how much.

    Raises:
        ExportError: on every rank of the group, when any of them fails; names rank and parameter.
    """
    export = open_export(models, hf, head, dialect=dialect, bucket_bytes=bucket_bytes)
    with closing(run_program(export.program, export.group, export.tensors)) as pairs:
        if dtype is None and device is None:
            yield from pairs
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
    bucket_bytes: int | None = None,
) -> dict[str, Tensor]:
    """``iter_hf_weights``, collected: the whole HF state dict on every rank."""
    pairs = iter_hf_weights(
        models, hf=hf, head=head, dtype=dtype, device=device, dialect=dialect, bucket_bytes=bucket_bytes
    )
    return dict(pairs)


def open_export(
    models: Models, hf: HF | None, head: str, *, dialect: Dialect | None = None, bucket_bytes: int | None = None
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
        check_storage(bound.tensors)
    except BridgeError as problem:
        error = str(problem)
    fingerprint = (bound and bound.fingerprint(), group.rank, group.size, bucket_bytes)
    kept = _plans.get(first)
    stale = kept is None or kept.fingerprint != fingerprint
    if group.any(stale or bool(error)):
        answers = group.exchange(
            (bound.inventory() if bound else None, bucket_bytes, bound and bound.mapping.rules, error)
        )
        raise_failures([message for _, _, _, message in answers])
        if len({size for _, size, _, _ in answers}) > 1:
            raise ExportError(
                f"bucket_bytes differs between ranks: {[answer[1] for answer in answers]}; pass one value"
            )
        assert bound is not None
        if any(rules != bound.mapping.rules for _, _, rules, _ in answers):
            raise ExportError("the ranks name weights by different rules; pass the same hf, head and dialect on each")
        inventories = [each for each, _, _, _ in answers if each]
        num_layers = first.config.num_layers
        plan = plan_export(bound.mapping, bound.axes, num_layers, inventories, bucket_bytes=bucket_bytes)
        kept = _plans[first] = _Kept(fingerprint, Program(plan, group.rank, group.size))
    assert bound is not None
    assert kept is not None
    return Export(kept.program, group, bound.tensors)
