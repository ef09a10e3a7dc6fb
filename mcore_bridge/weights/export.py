"""mcore to HF: agree on a plan, run it, yield HF tensors. The one iterator that everything consumes.

Nothing communicates until the first ``next``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from mcore_bridge.rules.mapping import Dialect
from mcore_bridge.weights.agreement import open_export
from mcore_bridge.weights.bound import Models
from mcore_bridge.weights.dtypes import Dtypes, problem_of, wanted_dtype
from mcore_bridge.weights.plan.target import Target
from mcore_bridge.weights.provenance import HF
from mcore_bridge.weights.transfer.executor import run_program


def iter_hf_weights(
    models: Models,
    *,
    hf: HF | None = None,
    head: str = "lm",
    dtype: Dtypes = None,
    device: torch.device | str | None = None,
    dialect: Dialect | None = None,
    bucket_bytes: int | None = None,
    target: Target = "everything",
    copy: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every HF tensor, whole, on every rank: same names, order, shapes and bits; or what ``target`` says.

    All ranks of a model replica (tensor, expert and pipeline ranks) iterate together, also those that get nothing;
    replicas do so on their own. Only where megatron-core's DDP has ``overlap_param_gather`` do all of them begin
    together, from the first export on: what a step of the optimizer may have left for the next forward is gathered, and
    where one of them cannot begin, none does. Tensors are detached copies that the caller may keep, unless ``copy`` is
    False. A rank may stop early: close the generator (or let go of it), and it goes on sending what the others still
    need before ``close`` returns; but it must have begun, with the first ``next``.

    Args:
        models: this rank's chunks, wrapped or not; parameters may be on CPU while the group is NCCL.
        hf, head: for models that ``build_model`` did not make: their HF config or folder, and their head.
        dtype: cast to this on the way out; by default each tensor has its own.
        device: where tensors are yielded; by default where the group communicates.
        dialect: "split" gives each routed expert a tensor of its own, "fused" those of a layer one for all; None is as
            the checkpoint has it that the model came from.
        bucket_bytes: of the messages that are on their way to a rank. An export takes at most three times this, beside
            the model and the largest tensor (or what engines fuse of a layer): pipeline stages take turns, and experts
            go in shifts, where all at once would take more. None is what takes 2 GB in all, or half as much again as
            the largest tensor. What the caller still holds of the tensor before comes to it where buckets are smaller
            than 512 MB, and a few KB for each rank. ``mcore-bridge plan`` says how much.
        target: what this rank gets, whatever others get: "everything"; "nothing", so that it only sends; or an
            ``EngineRank``, whose slices alone travel to it. ``mb.engine_ranks`` makes those of an engine.
        copy: False yields tensors that arrived whole, such as those of most experts, as views of what arrived: valid
            until the next one is asked for, and only to be read. They take less memory, and the next message waits.

    Raises:
        ExportError: on every rank of the group, when any of them fails; names rank and parameter.
        MappingError: on every rank of the group, when what they hold together is no whole model.
        TargetError: on every rank of the group, when the model cannot be cut as the target of any of them says.
    """
    options: dict[str, Any] = {"dialect": dialect, "bucket_bytes": bucket_bytes, "target": target}
    export = open_export(models, hf, head, **options, problem=problem_of(dtype))
    with closing(run_program(export.program, export.group, export.bound.tensors, lend=not copy)) as pairs:
        if dtype is None and device is None:
            yield from pairs
        for name, tensor in pairs:
            try:
                found = tensor.to(device or tensor.device, wanted_dtype(name, tensor.dtype, dtype))
            except Exception as problem:  # such as no memory: it fails the export, on every rank
                pairs.throw(problem)
            yield name, found


def to_hf_state_dict(
    models: Models,
    *,
    hf: HF | None = None,
    head: str = "lm",
    dtype: Dtypes = None,
    device: torch.device | str | None = None,
    dialect: Dialect | None = None,
    bucket_bytes: int | None = None,
    target: Target = "everything",
) -> dict[str, Tensor]:
    """``iter_hf_weights``, collected: the whole HF state dict on every rank, or what ``target`` says."""
    pairs = iter_hf_weights(
        models, hf=hf, head=head, dtype=dtype, device=device, dialect=dialect, bucket_bytes=bucket_bytes, target=target
    )
    return dict(pairs)
